"""What the supervisor of a host is told: of this one through its channel, of another one through the carrier's.

What is for a host that is not there is dropped: it is lost with its workers, or about to join with none.
"""

from everserve.wire.channel import Channel
from everserve.wire.messages import AdmitHost, EvictHost, Provision, Release, SignalWorker

ToHost = Provision | Release | SignalWorker


class Hosts:
    """All hosts of the instance; this one is the first."""

    def __init__(self, supervisor: Channel) -> None:
        self._supervisor = supervisor
        self.carrier: Channel | None = None  # None: there is no other host, or no carrier at the moment

    def send(self, host: int, message: ToHost, fds: list[int] | None = None) -> None:
        channel = self._supervisor if host == 0 else self.carrier
        if channel is not None:
            channel.send(message, fds or ())

    def tell_carrier(self, message: EvictHost | AdmitHost) -> None:
        if self.carrier is not None:
            self.carrier.send(message)
