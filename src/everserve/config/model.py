"""Where weights come from, and what they are loaded as."""

from typing import Annotated

from everserve.config.base import Config, Flag

_SHORT_DTYPES = {"float": "float32", "half": "float16"}  # as vLLM's users may write them
_KERNELS = {"awq_marlin": "awq", "gptq_marlin": "gptq"}  # names of vLLM's kernels -> what they are for


class ModelSource(Config, frozen=True, kw_only=True):
    """A model's directory, and how to read it."""

    directory: str
    dtype: Annotated[
        str,
        Flag(
            "auto, float32 (float), bfloat16 or float16 (half): of weights and KV cache.",
            choices=("auto", "float32", "bfloat16", "float16", *_SHORT_DTYPES),
            parse=lambda name: _SHORT_DTYPES.get(name, name),
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        Flag(
            "fp8, mxfp4, compressed-tensors, awq or gptq: what config.json says that weights are quantised with. It is"
            " only checked.",
            short="-q",
            choices=("fp8", "mxfp4", "compressed-tensors", "awq", "gptq", *_KERNELS),
            parse=lambda name: _KERNELS.get(name, name),
        ),
    ] = None
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
    tensor_parallel: bool = False  # of --tensor-parallel-size: how the model is cut (model/cut.py)
    divide_heads: bool = (
        False  # on a GPU: one head is computed at a time, as where they are divided, so in one process too
    )
    divides_heads: bool = False  # attention heads and their KV are at expert workers too (seam/heads.py)
    own_head: bool | None = None  # a tied head has weights of its own in the files (model/tied_head.py); None: look
    shard_bytes: tuple[int, ...] = ()  # of the largest shard of each FFN, where it is quantised; (): as `dtype` says
    fingerprint: str = ""  # of the files when the instance was started (model/fingerprint.py); "": any will do
