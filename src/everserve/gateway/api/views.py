"""What many may watch: the metrics, the cluster and its experts, each written once for all who ask."""

from collections.abc import Callable, Iterable
from typing import cast

from fastapi import Request

from everserve.gateway.api.exposition import Metrics
from everserve.gateway.gateway import Gateway
from everserve.gateway.http.responses import encode
from everserve.gateway.http.shared import Shared


class Views:
    """The views of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        def shared(write: Callable[[], Iterable[bytes]]) -> Shared:
            return Shared(write, gateway.slices, gateway.connections.turns)

        cluster = gateway.cluster
        self.metrics = shared(Metrics(gateway).pieces)
        self.cluster = shared(cluster.pieces)
        self.experts = shared(lambda: cluster.experts.pieces(cluster.moves))
        self.experts_map = shared(lambda: [encode(cluster.experts.map(cluster.moves))])


def views_of(request: Request) -> Views:
    return cast(Views, request.app.state.views)
