"""What a worker computes on."""

from typing import Annotated

from everserve.config.base import Config, Flag


class ComputeConfig(Config, frozen=True, kw_only=True):
    """The kind of device, and how it is used."""

    device: Annotated[  # to a worker it is never "auto"
        str,
        Flag("What workers compute on: cpu, cuda, or auto: cuda if there is a GPU.", choices=("auto", "cpu", "cuda")),
    ] = "auto"
    num_threads: Annotated[
        int | None,
        Flag("Compute threads of a worker. Default: the cores, shared by the workers.", name="threads", min=1),
    ] = None
    check_rows_s: Annotated[
        float,
        Flag("On CPUs: every so many seconds an expert worker has one of its rows computed by another one, too. One"
             " that computes wrong is found so, and its device evacuated. 0: never.", min=0),
    ] = 1.0  # fmt: skip
    batch_invariant: Annotated[bool, Flag("A row's numbers never depend on the rest of the batch.")] = False
