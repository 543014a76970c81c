"""What a captured step (backends/cuda/captured.py) needs of its experts, wherever they are."""

from typing import Protocol

from everserve.seam import ExpertIO


class CapturedExperts(ExpertIO, Protocol):
    """Calls of an `ExpertIO` are recorded once, and replayed in every step; the rest is for the host, step by step."""

    def begin_step(self, num_rows: int) -> None:
        """Before a step is launched: bring what the device reads up to date."""

    def end_step(self) -> None:
        """The step has ended, well or not."""

    def wait(self, address: int, want: int, due_ns: int) -> int:
        """Until the device has stored `want` there (Outcome.DONE), which is due at `due_ns` of the monotonic clock, or
        there is something to attend to."""

    def attend(self, outcome: int) -> None:
        """Look after others, so that the step can end: who is waited for in vain is given up."""

    def heal(self, moe_layer: int, missing: int, absent: int) -> bool:
        """The step stopped in this layer. Returns whether its rows must be sent again; StepAbandoned if an expert has
        no place."""
