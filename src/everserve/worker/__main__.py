"""`python -m everserve.worker`: started by the supervisor, never by hand."""

import argparse
import gc
import logging
import socket
import sys
import time

from everserve.errors import UserError
from everserve.runtime.channel import Channel, ChannelClosed
from everserve.runtime.events import EventLog, WorkerBecameReady
from everserve.runtime.messages import EventHappened, Failed, Ready, StartWorker, WorkerReady

log = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--gateway-fd", type=int, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s worker %(levelname)s %(message)s")
    control = Channel(socket.socket(fileno=args.control_fd))
    gateway = Channel(socket.socket(fileno=args.gateway_fd))
    try:
        start = control.receive()
    except ChannelClosed:
        return 0
    assert isinstance(start, StartWorker), "the first message says what to be"
    return serve(start, control, gateway)


def serve(start: StartWorker, control: Channel, gateway: Channel) -> int:
    """Load, say ready, and run the loop."""
    began = time.monotonic()
    try:
        from everserve.worker.build import build  # noqa: PLC0415 (torch takes a second: say hello first)

        built = build(start)
    except UserError as error:
        control.send(Failed(reason=str(error), user_error=True))
        return 1
    from everserve.worker.loop import WorkerLoop  # noqa: PLC0415

    events = EventLog(f"worker-{start.rank}", start.event_log, lambda event: control.send(EventHappened(event=event)))
    engine = built.engine
    gateway.send(
        WorkerReady(
            rank=start.rank,
            incarnation=start.incarnation,
            max_model_len=engine.config.max_model_len,
            vocab_size=engine.config.vocab_size,
            num_blocks=engine.config.num_blocks,
            block_size=engine.config.block_size,
        )
    )
    events.append(
        WorkerBecameReady(
            process=events.process,
            rank=start.rank,
            incarnation=start.incarnation,
            load_s=time.monotonic() - began,
            num_blocks=engine.config.num_blocks,
        )
    )
    control.send(Ready())
    log.info(
        "rank %d ready in %.1f s: %s ops, %d KV blocks of %d tokens",
        start.rank, time.monotonic() - began, built.ops.name, engine.config.num_blocks, engine.config.block_size,
    )  # fmt: skip
    gc.collect()
    gc.freeze()  # what start-up made stays for good; searching it at every full collection stalls streams for 50 ms
    WorkerLoop(start, engine, gateway, control, events).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
