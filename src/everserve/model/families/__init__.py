"""Families: the architectures that are served, one file each.

A family says in which fields of config.json its `ModelSpec` is, and under which names its weights are in the files:

    read(fields) -> ModelSpec     with what all families have in common in reading.py
    names                         names.py has those of most files; a family has what differs

To add a family: a file here, a line in `FAMILIES`, a tiny config in tests/support/families.py, and
`python -m everserve.model.families` for docs/models.md.
"""

from everserve.model.families import (
    arcee,
    cohere2,
    deepseek,
    dots1,
    ernie,
    exaone4,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    llama4,
    minicpm3,
    minimax_m2,
    ministral,
    mistral,
    olmo,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    seed_oss,
    smollm3,
    solar_open,
    youtu,
)
from everserve.model.families.family import Family

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *mistral.FAMILIES,
    *ministral.FAMILIES,
    *qwen2.FAMILIES,
    *qwen2_moe.FAMILIES,
    *qwen3.FAMILIES,
    *glm4.FAMILIES,
    *glm4_moe.FAMILIES,
    *glm4_moe_lite.FAMILIES,
    *deepseek.FAMILIES,
    *minimax_m2.FAMILIES,
    *gpt_oss.FAMILIES,
    *gemma2.FAMILIES,
    *gemma3.FAMILIES,
    *phi3.FAMILIES,
    *llama4.FAMILIES,
    *olmo.FAMILIES,
    *olmoe.FAMILIES,
    *granite.FAMILIES,
    *hunyuan.FAMILIES,
    *dots1.FAMILIES,
    *solar_open.FAMILIES,
    *ernie.FAMILIES,
    *smollm3.FAMILIES,
    *seed_oss.FAMILIES,
    *exaone4.FAMILIES,
    *cohere2.FAMILIES,
    *minicpm3.FAMILIES,
    *youtu.FAMILIES,
    *arcee.FAMILIES,
)
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}


def of_wrapper(architecture: str, text_type: object) -> Family | None:
    """The family of the text model in files of this architecture, which call it by this type."""
    found = [family for family in FAMILIES if architecture and family.wrapper == architecture]
    return next((family for family in found if family.text_type in ("", text_type)), None)
