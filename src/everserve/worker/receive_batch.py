"""Streams that the gateway sends together begin in one step.

A socket holds fifty of them at a time, or ten long ones, and is read between two steps. Were the streams of a lost
worker taken as they come, part after part, each part would wait for a step of the part before: the last ones longest,
and for nothing, because the gateway has sent the rest within milliseconds after there is room for it.
"""

import time
from collections.abc import Iterator

from everserve.wire.channel import Channel
from everserve.wire.messages import AnyMessage, Submit

_TOGETHER_S = 0.03  # at most: those that run already must not wait much longer than for a step


def receive_together(gateway: Channel) -> Iterator[AnyMessage]:
    """Every message that has arrived, and those that were announced with them. ChannelClosed if the gateway is gone."""
    until_s = time.monotonic() + _TOGETHER_S
    num_following = 0
    while True:
        for message in gateway.receive_all():
            if isinstance(message, Submit):
                num_following = message.num_following
            yield message
        left_s = until_s - time.monotonic()
        if not num_following or left_s <= 0 or not gateway.wait(left_s):
            return
