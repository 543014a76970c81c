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
    fingerprint: str = ""  # of the files when the instance was started (model/fingerprint.py); "": any will do
