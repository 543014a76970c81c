"""Work that no client waits for: responses in the background, batches, and what is too old.

One gateway process of an instance takes up what others have left: the one that holds the store's lock (store/store.py).
"""

import asyncio
import logging

from starlette.types import ASGIApp

from everserve.errors import EverserveError
from everserve.gateway.api.batches.runner import Batches
from everserve.gateway.api.responses.background import BackgroundResponses
from everserve.gateway.gateway import Gateway
from everserve.gateway.store.store import Store

_WAIT_S = 0.2  # for the lock, and for a worker that has never been there
_EXPIRE_S = 600.0
log = logging.getLogger(__name__)


class Jobs:
    """The jobs of one process."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._gateway = gateway
        self.responses = BackgroundResponses(app, gateway)
        self.batches = Batches(app, gateway)

    async def run(self) -> None:
        """Until it is cancelled."""
        store = self._gateway.store
        if store is None:
            return
        while not store.take_runner() or self._gateway.fleet.limits is None:
            await asyncio.sleep(_WAIT_S)
        await self.responses.take_up(store)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.batches.run(store))
            group.create_task(_expire(store))

    def close(self) -> None:
        """The process ends: what has not ended is taken up by the next."""
        self.responses.close()
        self.batches.close()


async def _expire(store: Store) -> None:
    while True:
        try:
            await store.expire()
        except EverserveError as error:
            log.warning("what is too old was not dropped: %s", error)
        await asyncio.sleep(_EXPIRE_S)
