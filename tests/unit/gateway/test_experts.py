"""/cluster/experts: load and places of experts, as operators and the dashboard see them."""

import asyncio
import struct

import msgspec

from everserve.cli.status import _experts_lines
from everserve.gateway.http.responses import ExpertsView
from everserve.gateway.observe.experts import Experts
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Epoch, Rank, SlotId
from everserve.tables.routes import Routes
from everserve.tables.slots import Fill
from everserve.wire.messages import ExpertsChanged
from tests.support.gateway_toy import member, toy_server, until

PLACES = [[(Rank(4), SlotId(0)), (Rank(5), SlotId(1))], [(Rank(5), SlotId(0))]]
ROUTES = Routes.of(Epoch(3), [PLACES, [[], PLACES[1]]], [[2, 1], [1, 1]]).with_mask([(1, 0)], mask_id=1)


def change(*load: float, routes: Routes | None = ROUTES, ratio: float = 1.25) -> ExpertsChanged:
    packed = struct.pack("<4f", *load)
    return ExpertsChanged(moe_layers=(0, 2), load=packed, max_over_mean=ratio, worst_layer=2, routes=routes)


def written(experts: Experts) -> ExpertsView:
    return msgspec.json.decode(b"".join(experts.pieces({})), type=ExpertsView)


def test_load_and_places() -> None:
    async def test() -> None:
        async with toy_server() as server:
            empty = (await server.request("GET", "/cluster/experts")).json
            assert empty == {"layers": [], "imbalance": {"max_over_mean": None, "worst_layer": None}}
            server.orchestrator.channel.send(change(8.0, 2.0, 0.0, 5.04))
            server.orchestrator.publish(member(0), moves={Rank(4): (Fill(1, 3, 0),)})
            await until(lambda: server.gateway.cluster.moves != {})
            view = (await server.request("GET", "/cluster/experts")).json
            first = {"rank": 4, "slot": 0, "active": True}
            second = {"rank": 5, "slot": 1, "active": True}
            shadowless = [{"rank": 5, "slot": 0, "active": True}]
            assert view == {
                "layers": [
                    {
                        "layer": 0,
                        "kind": "expert",
                        "experts": [
                            {"expert": 0, "load": 8.0, "places": [first, second], "moving": False, "masked": False},
                            {"expert": 1, "load": 2.0, "places": shadowless, "moving": False, "masked": False},
                        ],
                    },
                    {
                        "layer": 2,
                        "kind": "expert",
                        "experts": [
                            {"expert": 0, "load": 0.0, "places": [], "moving": True, "masked": True},
                            {"expert": 1, "load": 5.0, "places": shadowless, "moving": False, "masked": False},
                        ],
                    },
                ],
                "imbalance": {"max_over_mean": 1.25, "worst_layer": 2},
            }
            lines = _experts_lines(view)
            assert lines[0] == "max/mean load of expert workers: 1.25"
            assert lines[3].split("  ")[-1].startswith("0: 80% @ 4 5, 1: 20% @ 5")
            compact = (await server.request("GET", "/cluster/experts?form=map")).json
            assert compact["load"] == [[8.0, 2.0], [0.0, 5.0]] and compact["layers"] == [0, 2]
            assert compact["places"] == [[2, 1], [0, 1]] and compact["active"] == [[2, 1], [1, 1]]
            assert compact["moving"] == compact["masked"] == [[1, 0]] and compact["kinds"] == ["expert", "expert"]
            metrics = (await server.request("GET", "/metrics")).body.decode()
            assert "everserve_expert_load_max_over_mean 1.25" in metrics

    asyncio.run(asyncio.wait_for(test(), 20))


def test_routes_are_kept_while_only_loads_change() -> None:
    async def test() -> None:
        async with toy_server() as server:
            server.orchestrator.channel.send(change(1.0, 1.0, 1.0, 1.0))
            server.orchestrator.channel.send(change(2.0, 2.0, 2.0, 2.0, routes=None, ratio=0.0))
            experts = server.gateway.cluster.experts
            await until(lambda: experts.map({}).load == [[2.0, 2.0], [2.0, 2.0]])
            assert experts.map({}).places == [[2, 1], [0, 1]]
            assert written(experts).imbalance.max_over_mean is None, "without load there is no ratio"
            metrics = (await server.request("GET", "/metrics")).body.decode().splitlines()
            assert not any(line.startswith("everserve_expert_load_max_over_mean") for line in metrics)

    asyncio.run(asyncio.wait_for(test(), 20))


def test_layers_of_different_kinds_and_widths() -> None:
    slices = [PLACES[0], PLACES[1], PLACES[1]]
    routes = Routes.of(Epoch(3), [PLACES, slices], [[1, 1], [1, 2, 1]])
    load = struct.pack("<6f", 1.0, 2.0, 0.0, 3.0, 4.0, 5.0)  # the third of layer 0 does not exist
    kinds = (ShardKind.EXPERT, ShardKind.SLICE)
    shown = Experts()
    shown.on_changed(
        ExpertsChanged(moe_layers=(0, 1), load=load, max_over_mean=1.0, worst_layer=0, routes=routes, kinds=kinds)
    )
    found = shown.map({})
    assert found.kinds == ["expert", "slice"] and found.load == [[1.0, 2.0], [3.0, 4.0, 5.0]]
    assert found.places == [[2, 1], [2, 1, 1]] and found.active == [[1, 1], [1, 2, 1]]
    assert [(layer.kind, len(layer.experts)) for layer in written(shown).layers] == [("expert", 2), ("slice", 3)]
