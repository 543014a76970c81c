"""What the gateway asks the supervisor for: signals to the processes that are not workers."""

from collections.abc import Callable

from everserve.gateway.questions import Questions
from everserve.wire.messages import ProcessSignalled, SignalProcess

PROCESSES = ("orchestrator", "anchor", "zygote")  # may be killed; the gateway's death would end the instance


class SupervisorLink:
    """Questions on the control channel; `__main__.py`, which reads that channel, passes the answers on."""

    def __init__(self, send: Callable[[SignalProcess], None]) -> None:
        self._send = send
        self._signals: Questions[ProcessSignalled] = Questions("supervisor")

    async def signal(self, name: str, signal: int) -> ProcessSignalled:
        """Have a signal sent to this process; returns when it was sent, or could not be."""
        return await self._signals.ask(lambda id: self._send(SignalProcess(id=id, name=name, signal=signal)))

    def on_answer(self, message: ProcessSignalled) -> None:
        self._signals.answer(message.id, message)
