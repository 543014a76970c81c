"""Where weights come from, and what they are loaded as."""

from typing import Annotated

from everserve.config.base import Config, Flag


class ModelSource(Config, frozen=True, kw_only=True):
    """A model's directory, and how to read it."""

    directory: str
    dtype: Annotated[
        str,
        Flag(
            "auto, float32, bfloat16 or float16: of weights and KV cache.",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    load_format: Annotated[
        str,
        Flag(
            "auto: the model's files; dummy: random weights, from its config.json alone (GPU only).",
            choices=("auto", "dummy"),
        ),
    ] = "auto"
    weights: Annotated[  # on a GPU always "memory"
        str,
        Flag(
            "Experts of expert workers on CPUs. mapped: read where the model's files are mapped; memory: copied to"
            " memory that outlives their worker, so that lost experts come from peers' memory instead of the files.",
            choices=("mapped", "memory"),
        ),
    ] = "mapped"
    expert_backup: Annotated[
        str,
        Flag(
            "host: every expert once in host memory, filled in the background after the start; experts that a device"
            " has lost come from there.",
            choices=("off", "host"),
        ),
    ] = "off"
    divide_heads: Annotated[  # None: nothing was said; told to workers it is never None
        bool | None,
        Flag(
            "On a GPU, with --tensor-parallel-size: divide attention heads and their KV too. On CPUs they always are."
            " Default: if the model's can be divided.",
        ),
    ] = None
    tensor_parallel: bool = False  # of --tensor-parallel-size: how the model is cut (model/cut.py)
    divides_heads: bool = False  # attention heads and their KV are at expert workers too (seam/heads.py)
    fingerprint: str = ""  # of the files when the instance was started (model/fingerprint.py); "": any will do
