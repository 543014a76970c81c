"""What other architectures need that is not built, so that the line which refuses one says why."""

_INDEX = "an index of keys (sparse latent attention)"
_RECURRENT = "recurrent layers (linear attention, state-space or convolution layers)"

_NEEDS = {
    "DeepseekV32ForCausalLM": _INDEX,
    "DeepseekV4ForCausalLM": f"several residual streams and {_INDEX}",
    "GlmMoeDsaForCausalLM": _INDEX,
    "LongcatFlashForCausalLM": "layers with two attentions",
    "BambaForCausalLM": _RECURRENT,
    "FalconH1ForCausalLM": _RECURRENT,
    "GraniteMoeHybridForCausalLM": _RECURRENT,
    "JambaForCausalLM": _RECURRENT,
    "KimiLinearForCausalLM": _RECURRENT,
    "Lfm2ForCausalLM": _RECURRENT,
    "Lfm2MoeForCausalLM": _RECURRENT,
    "MambaForCausalLM": _RECURRENT,
    "MiniMaxForCausalLM": _RECURRENT,
    "NemotronHForCausalLM": _RECURRENT,
    "Qwen3NextForCausalLM": f"{_RECURRENT} (gated delta rule)",
    "Qwen3_5ForCausalLM": f"{_RECURRENT} (gated delta rule)",
    "Qwen3_5MoeForCausalLM": f"{_RECURRENT} (gated delta rule)",
    "Gemma3nForCausalLM": "several residual streams",
    "Gemma4ForCausalLM": "layers whose keys and values are not alike",
    "MiMoV2FlashForCausalLM": "layers whose keys and values are not alike",
    "PhimoeForCausalLM": "a router that jitters (sparsemixer)",
}


def needs(architecture: object) -> str:
    """What of an architecture is not built; empty if that is not known."""
    name = str(architecture)
    if name.endswith(("ForConditionalGeneration", "ForVision2Seq", "ForImageTextToText")):
        return "images or audio beside text"
    return _NEEDS.get(name, "")
