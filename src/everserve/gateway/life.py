"""A gateway's life:

GatewayBegun -> serve HTTP -> go on with what the one before has left (takeover.py) -> Ready
-> handle the supervisor's messages (supervised.py)
"""

import asyncio
import gc
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI

from everserve.config.gateway import GatewayConfig
from everserve.gateway.api.app import create_app
from everserve.gateway.api.jobs import Jobs
from everserve.gateway.gateway import Gateway
from everserve.gateway.http.access import owners
from everserve.gateway.http.server import Server
from everserve.gateway.inheritance import inherit
from everserve.gateway.observe.feed import EventFeed
from everserve.gateway.observe.tracing import make_tracing
from everserve.gateway.prepared import Prepared, failed
from everserve.gateway.questions import Questions
from everserve.gateway.store.store import Store
from everserve.gateway.streams.fleet import Fleet
from everserve.gateway.streams.others import Others, SharedOthers
from everserve.gateway.succession import Giver
from everserve.gateway.supervised import Supervised
from everserve.gateway.takeover import Takeover
from everserve.gateway.text.sampling import read_defaults
from everserve.gateway.text.tokenizer import ModelTokenizer
from everserve.ledger.ledger import Ledger
from everserve.ledger.shared import SharedTable
from everserve.procs import process
from everserve.tables.members import gateway_name
from everserve.wire.channel import AsyncChannel
from everserve.wire.event_log import EventLog
from everserve.wire.events import AnyEvent
from everserve.wire.messages import (
    EventHappened,
    Ready,
)
from everserve.words import count

KEEP_ALIVE_S = 60  # idle connections; longer than clients' pools keep them, so that they close first
CLOSE_S = 2  # after the streams have ended, for connections to close
_SWITCH_S = 0.0005  # for which a tokenizer's thread may keep the event loop from the interpreter (Python's own: 5 ms)
_BEAT_S = 0.25

log = logging.getLogger(__name__)


class Life:
    """One gateway, from the moment that its process exists."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._ledger = prepared.ledger
        self._ledger.open()
        self._is_first = self._ledger.generation == 1
        # What comes stays in the socket until it is handled: should this process die before, the next gateway reads it.
        channel = prepared.control if self._is_first else prepared.control.sock
        self._control = AsyncChannel(channel, waits_for_room=True, reads=False)
        self._begun = partial(prepared.begun, self._ledger.generation)

    async def run(self) -> int:
        """Until it is told to end, or cannot begin. Returns its exit status."""
        self._control.send(self._begun())
        made = await self._make()
        if made is None:
            return 1
        gateway, app = made
        server = _server(app, gateway)
        serving = asyncio.create_task(server.serve(sockets=[self._prepared.listen]))
        while not server.started and not serving.done():
            await asyncio.sleep(0)
        beating = asyncio.create_task(_beat(self._ledger))
        await self._take_over(gateway, server)
        jobs: Jobs = app.state.jobs
        handling = asyncio.create_task(self._supervised(gateway, server, jobs).run())
        ticking = asyncio.create_task(gateway.live.run())
        working = asyncio.create_task(jobs.run())
        working.add_done_callback(_raise)
        done, _ = await asyncio.wait((serving, handling, ticking, beating), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises what went wrong
        await gateway.tracing.close()
        working.remove_done_callback(_raise)
        working.cancel()
        if gateway.store is not None:
            gateway.store.close()
        return 0

    async def _make(self) -> tuple[Gateway, FastAPI] | None:
        """None: it cannot be made, and the supervisor has been told why."""
        prepared = self._prepared
        if prepared.failure is not None:
            self._control.send(prepared.failure)
            return None
        assert prepared.tokenizer is not None
        try:
            gateway = _build(prepared, prepared.tokenizer)
            app = create_app(gateway)
            gateway.tokenizer.prepare()
            if self._is_first:
                await gateway.tokenizer.check_template()
        except Exception as error:
            self._control.send(failed(error))
            return None
        inherit(gateway, self._ledger, prepared.table)
        control = self._control
        gateway.supervisor = Questions("supervisor", control.send)
        gateway.departures.send = lambda message, fd: control.give(message, [fd])  # also while it takes over
        if gateway.config.gateways > 1:
            gateway.feed.tell_others = lambda event: control.send(EventHappened(event=event))
        return gateway, app

    async def _take_over(self, gateway: Gateway, server: Server) -> None:
        """Goes on with what the gateway before has left; then this one serves."""
        ledger, listen = self._ledger, self._prepared.listen
        takeover = Takeover(gateway, ledger, listen, server.create_protocol, self._control.descriptors)
        await takeover.run()
        if self._is_first:
            _freeze_garbage()
        ledger.note_ready()
        self._prepared.table.serves = True
        self._control.send(Ready())
        if not self._is_first:
            log.warning("goes on with %s", count(takeover.num_connections, "connection"))

    def _supervised(self, gateway: Gateway, server: Server, jobs: Jobs) -> Supervised:
        knows_nothing = None if self._is_first else self._ledger.generation
        giver = Giver(self._control, self._ledger, self._prepared.listen)
        return Supervised(self._control, gateway, server, jobs, giver, self._begun, knows_nothing)


def _server(app: FastAPI, gateway: Gateway) -> Server:
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,  # procs/logs.py has done it
        log_level="critical",  # the app reports its own errors; clients' mistakes are not worth a line
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
    )
    return Server(config, gateway.connections)


async def _beat(ledger: Ledger) -> None:
    """Beats as long as the loop runs."""
    while True:
        ledger.beat()
        await asyncio.sleep(_BEAT_S)


def _build(prepared: Prepared, tokenizer: ModelTokenizer) -> Gateway:
    config, number, table = prepared.config, prepared.number, prepared.table
    table.clear()
    defaults = read_defaults(config.model, tokenizer.eos_id)
    feed = EventFeed()
    events = EventLog(gateway_name(number), config.event_log, tell=feed.publish_own)

    def tell(event: AnyEvent) -> None:
        events.append(msgspec.structs.replace(event, process=events.process) if number else event)

    fleet = Fleet(config.max_queue, tell=tell, number=number, others=_others(config, table))
    gateway = Gateway(config, tokenizer, defaults, fleet, feed, make_tracing(), number)
    if config.state_dir is not None and number == 0:
        gateway.store = Store(Path(config.state_dir), config.state_bytes, config.state_days)
    return gateway


def _others(config: GatewayConfig, table: SharedTable) -> Others:
    return SharedOthers(table, owners(config)) if config.gateways > 1 else Others()


def _raise(done: "asyncio.Task[None]") -> None:
    """A bug of ours ends the process."""
    if not done.cancelled():
        done.result()


def _freeze_garbage() -> None:
    """What start-up made stays for good; looking through it at every full collection costs tens of milliseconds."""
    gc.collect()
    gc.freeze()


def _die(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An unhandled exception is a bug of ours: print it and exit; the supervisor decides."""
    loop.default_exception_handler(context)
    os._exit(70)


def live(prepared: Prepared) -> int:
    """A gateway, from the moment that its process exists."""
    process.set_name(f"es-{gateway_name(prepared.number)}")
    process.die_sooner_than_parent()
    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_exception_handler(_die)
        return runner.run(_live(prepared))


async def _live(prepared: Prepared) -> int:
    return await Life(prepared).run()
