"""What is the same for every gateway of one keeper: read and loaded once, before the first."""

import logging
import os
import socket
from dataclasses import dataclass

from everserve.config.gateway import GatewayConfig
from everserve.errors import UserError
from everserve.gateway.text.tokenizer import ModelTokenizer, load_tokenizer
from everserve.ledger import writer
from everserve.ledger.ledger import Ledger
from everserve.ledger.shared import SharedTable
from everserve.wire.channel import Channel
from everserve.wire.messages import (
    Failed,
    GatewayBegun,
    StartGateway,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """It is copied with each gateway's process."""

    control: Channel  # which the first gateway goes on with, and whose socket all of them have
    listen: socket.socket
    config: GatewayConfig
    number: int  # of the gateway
    ledger: Ledger
    table: SharedTable
    tokenizer: ModelTokenizer | None
    failure: Failed | None = None  # why there is no tokenizer

    def begun(self, generation: int) -> GatewayBegun:
        """What a gateway says first."""
        return GatewayBegun(pid=os.getpid(), generation=generation)


def prepare(control: Channel, listen: socket.socket, ledger: Ledger, table_fd: int) -> Prepared:
    """Reads the first message. ChannelClosed if the supervisor is gone."""
    start = control.receive()
    assert isinstance(start, StartGateway), f"expected StartGateway, got {type(start).__name__}"
    tokenizer, failure = None, None
    try:
        writer.prepare()
        tokenizer = load_tokenizer(start.config.model, start.config.chat_template)
    except Exception as error:
        failure = failed(error)
    table = SharedTable(table_fd, start.number, start.config.gateways)
    return Prepared(
        control=control,
        listen=listen,
        config=start.config,
        number=start.number,
        ledger=ledger,
        table=table,
        tokenizer=tokenizer,
        failure=failure,
    )


def failed(error: Exception) -> Failed:
    if isinstance(error, UserError):
        return Failed(reason=str(error), user_error=True)
    log.error("the gateway cannot be built", exc_info=error)
    return Failed(reason=f"{type(error).__name__}: {error}", user_error=False)
