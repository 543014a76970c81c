"""Qwen 2 and 2.5: biases of q, k and v, which the files do not mention."""

from everserve.model.families.family import Family
from everserve.model.families.reading import dense, gqa, model, num_layers, rms_norm
from everserve.model.families.windows import qwen_windows, with_windows
from everserve.model.fields import Fields
from everserve.model.spec import LayerSpec, ModelSpec


def read(f: Fields) -> ModelSpec:
    norm, num = rms_norm(f), num_layers(f)
    mixers = with_windows(gqa(f, qkv_bias=True), qwen_windows(f, num))
    ffn = dense(f)
    return model(f, [LayerSpec(mixer=mixer, ffn=ffn, norm=norm) for mixer in mixers], norm)


FAMILIES = (
    Family(
        architecture="Qwen2ForCausalLM", models="Qwen 2, 2.5, QwQ", kinds="biases, windows in some layers", read=read
    ),
)
