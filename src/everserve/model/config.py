"""ModelConfig: what one Hugging Face model directory says about its model, checked.

Fail closed: a field that would change the numbers and that we do not implement, or cannot read, is a ModelError of
one line that names the file, the field and what to do; so is a field that nothing reads and that is not known to be
harmless. Nothing here needs torch, so that the gateway and the planners can read a config cheaply.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from everserve.config.model import ModelSource
from everserve.errors import ModelError
from everserve.model.codecs import Quantisation
from everserve.model.derived import EXACT, KvSpec, cut_of, dense_at_home, home_weights, kv_of, weights_per_token
from everserve.model.families import BY_ARCHITECTURE, of_wrapper
from everserve.model.families.family import Family
from everserve.model.families.harmless import HARMLESS
from everserve.model.fields import MAX_INTEGER, Fields
from everserve.model.spec import Activation, Dense, Experts, Gqa, Latent, LayerSpec, ModelSpec, QkNorm, RopeConfig
from everserve.model.tied_head import has_own_head
from everserve.model.unbuilt import needs
from everserve.tables.calls import Call, FfnCut, ShardKind

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything the model's arithmetic depends on, and how an instance divides it."""

    architecture: str  # for messages, and for the names of tensors (layout.py)
    spec: ModelSpec
    tie_word_embeddings: bool  # the head is the embedding
    max_position_embeddings: int
    dtype: str  # one of DTYPES
    eos_token_ids: tuple[int, ...]
    tensor_parallel: bool = (
        False  # experts are cut where there are few, and dense FFNs of MoE models cross the seam too
    )

    divides_heads: bool = False  # heads are shards too

    @classmethod
    def from_source(cls, source: ModelSource) -> "ModelConfig":
        """The configuration as an instance serves it."""
        found = cls.from_directory(source.directory, own_head=source.own_head)
        return replace(found, tensor_parallel=source.tensor_parallel, divides_heads=source.divides_heads)

    @classmethod
    def from_directory(cls, path: str | Path, own_head: bool | None = None) -> "ModelConfig":
        """Read config.json, and the end-of-sequence ids of generation_config.json where it has some. `own_head`:
        whether a tied head has weights of its own in the files; None: look (tied_head.py)."""
        directory = Path(path)
        if not directory.is_dir():
            raise ModelError(f"{directory} is not a directory; give the path of a Hugging Face model directory")
        fields = Fields.from_file(directory / "config.json")
        family = _family(fields)
        Quantisation.of(fields)  # refuses what is not built
        if fields.get("architectures") == [family.wrapper]:
            fields = _text_fields(fields)
            if fields.has("quantization_config"):
                raise fields.error("quantization_config", "belongs beside text_config; move it, or correct the file")
        spec = family.read(fields)
        longest = _max_position_embeddings(fields, spec)
        config = cls(
            architecture=family.architecture,
            spec=_with_useful_windows(spec, longest),
            tie_word_embeddings=_is_tied(directory, fields, own_head, family.is_tied),
            max_position_embeddings=longest,
            dtype=_dtype(fields),
            eos_token_ids=_eos_token_ids(directory, fields, spec.vocab_size),
        )
        fields.ignore(*HARMLESS)
        fields.refuse_unread(family.architecture)
        return config

    # -- the model as a whole ------------------------------------------------------------------

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.spec.layers

    @property
    def num_layers(self) -> int:
        return len(self.spec.layers)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

    # -- keys and values: layers are alike, so far -------------------------------------------------

    @property
    def kv(self) -> KvSpec:
        """The KV of each layer."""
        return kv_of(self.spec.layers[0].mixer)

    @property
    def num_heads(self) -> int:
        return self.spec.layers[0].mixer.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.kv.num_heads

    @property
    def head_size(self) -> int:
        return self.kv.row_size

    @property
    def ropes(self) -> frozenset[tuple[RopeConfig, int]]:
        """All that layers have, with how much of a head they rotate."""
        mixers = (layer.mixer for layer in self.spec.layers)
        return frozenset((mixer.rope, mixer.rotary_size) for mixer in mixers if mixer.rope is not None)

    @property
    def visible_keys(self) -> int | None:
        """How many keys a row of any layer sees at most, its own included. None: in some layer all of them."""
        return max(filter(None, sizes), default=None) if all(sizes := self._windows) else None

    @property
    def _windows(self) -> list[int | None]:
        return [layer.mixer.window or layer.mixer.chunk for layer in self.spec.layers]

    @property
    def has_plain_heads(self) -> bool:
        """Whether all layers have the attention that GPUs can divide (plan/head_memory.py): whole heads are rotated,
        all alike; a norm in front of that, and nothing else."""
        first = self.spec.layers[0]
        mixer = first.mixer
        if not isinstance(mixer, Gqa):
            return False
        is_plain = mixer.qk_norm in (QkNorm.NONE, QkNorm.HEAD) and not mixer.norms_after_rope and not mixer.qkv_bias
        is_plain &= mixer.rope is not None and mixer.rotary_size == mixer.head_size and mixer.temperature is None
        is_plain &= mixer.window is mixer.chunk is mixer.softcap is None and not mixer.has_sinks
        is_plain &= mixer.scale == mixer.head_size**-0.5 and first.norm.offset == 0.0
        return is_plain and all((layer.mixer, layer.norm) == (mixer, first.norm) for layer in self.spec.layers)

    @property
    def has_heads_of_their_own(self) -> bool:
        """Whether a head can be computed without the others."""
        mixers = [layer.mixer for layer in self.spec.layers]
        return all(isinstance(mixer, Gqa) and mixer.qk_norm is not QkNorm.ROW for mixer in mixers)

    @property
    def has_latent_attention(self) -> bool:
        return isinstance(self.spec.layers[0].mixer, Latent)

    # -- experts -----------------------------------------------------------------------------------

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(i for i in range(self.num_layers) if self.is_moe_layer(i))

    @cached_property
    def _experts(self) -> Experts | None:
        """The experts of the layers that have some, all of which have as many."""
        return next((layer.ffn for layer in self.spec.layers if isinstance(layer.ffn, Experts)), None)

    @property
    def num_experts(self) -> int:
        """0 in a dense model."""
        return self._experts.number if self._experts is not None else 0

    @property
    def experts_per_token(self) -> int:
        return self._experts.router.top_k if self._experts is not None else 0

    def activation(self, layer: int) -> Activation:
        """The activation of the shards of a layer."""
        return self.spec.layers[layer].ffn.activation

    def is_moe_layer(self, layer: int) -> bool:
        return isinstance(self.spec.layers[layer].ffn, Experts)

    # -- weights -----------------------------------------------------------------------------------

    @property
    def outer_weights(self) -> dict[str, tuple[int, ...]]:
        """What is around the layers, and its shapes."""
        tables = ["embedding"] if self.tie_word_embeddings else ["embedding", "lm_head"]
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(tables, (self.vocab_size, self.hidden_size))
        return {"embedding": shapes.pop("embedding"), "final_norm": (self.hidden_size,), **shapes}

    @property
    def exact_weights(self) -> frozenset[str]:
        """Those that are float32 whatever the others are."""
        return EXACT

    def home_weights(self, layer: int) -> dict[str, tuple[int, ...]]:
        """What the home of a stream has of a layer, and its shapes."""
        has_ffn = not self.crosses_seam(layer)
        return home_weights(
            self.spec.layers[layer], self.hidden_size, has_heads=not self.divides_heads, has_ffn=has_ffn
        )

    def dense_at_home(self, layer: int) -> Dense | None:
        """What the home computes of a layer's FFN, beside what crosses the seam or instead of it."""
        return dense_at_home(self.spec.layers[layer], has_ffn=not self.crosses_seam(layer))

    @property
    def weights_per_token(self) -> int:
        """How many numbers of all layers a token is multiplied with."""
        return sum(weights_per_token(layer, self.hidden_size) for layer in self.spec.layers)

    @property
    def values_per_key(self) -> int:
        """How many numbers of keys, and as many of values, a token meets at each position that it sees."""
        return sum(_values_per_key(layer) for layer in self.spec.layers)

    # -- calls and shards --------------------------------------------------------------------------

    def crosses_seam(self, layer: int) -> bool:
        """Whether the FFN of this layer is one of the calls of a step, and may be computed by other workers. In models
        with experts the dense layers are few and stay at home, unless everything is to be divided."""
        return self.tensor_parallel or not self.moe_layers or self.is_moe_layer(layer)

    def cut(self, layer: int) -> FfnCut:
        """How the FFN of this layer is cut into shards."""
        return cut_of(layer, self.spec.layers[layer], self.tensor_parallel)

    @cached_property
    def cuts(self) -> tuple[FfnCut, ...]:
        """The cuts of all layers that cross the seam: the calls of a step, in order."""
        return tuple(self.cut(layer) for layer in range(self.num_layers) if self.crosses_seam(layer))

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """All calls of a step, in order. Where heads are divided a layer has two, and calls are numbered; else each FFN
        is the call with its layer's number."""
        if not self.divides_heads:
            return tuple(cut.call for cut in self.cuts)
        ffn = {cut.layer: cut.call for cut in self.cuts}
        heads = (Call(layer=i, kind=ShardKind.HEAD, num_shards=self.num_kv_heads) for i in range(self.num_layers))
        return tuple(call for head in heads for call in (head, ffn.get(head.layer)) if call is not None)

    @property
    def call_numbers(self) -> tuple[int, ...]:
        return tuple(range(len(self.calls))) if self.divides_heads else self.call_layers

    def numbers_of(self, *kinds: ShardKind) -> dict[int, int]:
        """Gives, by layer, the number of its call of one of these kinds."""
        numbered = zip(self.call_numbers, self.calls, strict=True)
        return {call.layer: number for number, call in numbered if call.kind in kinds}

    @property
    def call_layers(self) -> tuple[int, ...]:
        """The layer of each call."""
        return tuple(cut.layer for cut in self.cuts)

    @property
    def max_shards(self) -> int:
        """The shards of the call with the most."""
        return max(call.num_shards for call in self.calls)

    @property
    def max_shards_per_token(self) -> int:
        """The shards that one token asks, in the call with the most."""
        return max(cut.shards_per_token for cut in self.cuts)


def _family(fields: Fields) -> Family:
    known = ", ".join(BY_ARCHITECTURE)
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", f"must name one architecture; supported: {known}")
    text_type = fields.object("text_config").get("model_type")
    family = BY_ARCHITECTURE.get(names[0]) or of_wrapper(names[0], text_type)
    if family is not None:
        return family
    missing = needs(names[0])
    reason = f"needs {missing}, which is not built" if missing else "is not supported"
    raise fields.error("architectures", f"{reason}; serve a model that is one of {known}")


def _text_fields(fields: Fields) -> Fields:
    """The fields of the text model in a file that has another one for images. What the whole says counts where the text
    model does not say it itself; whether the head is the embedding, the whole says.
    """
    text = fields.object("text_config")
    if fields.has("tie_word_embeddings"):
        text.values["tie_word_embeddings"] = fields.flag("tie_word_embeddings")
    shared = ("dtype", "torch_dtype", "eos_token_id")
    text.assume(**{name: fields.get(name) for name in shared if fields.has(name)})
    return text


def _is_tied(directory: Path, fields: Fields, own_head: bool | None, default: bool) -> bool:
    """Whether the head is the embedding."""
    if not fields.flag("tie_word_embeddings", default):
        return False
    return not (has_own_head(directory) if own_head is None else own_head)


def _max_position_embeddings(fields: Fields, spec: ModelSpec) -> int:
    """Qwen asks its users to switch YaRN on by adding rope_scaling alone, leaving the old maximum in the file."""
    stated = fields.integer("max_position_embeddings")
    ropes = [layer.mixer.rope for layer in spec.layers if layer.mixer.rope is not None]
    longest = (int(rope.factor * rope.original_max_positions) for rope in ropes if rope.kind == "yarn")
    return max(stated, min(max(longest, default=0), MAX_INTEGER))


def _with_useful_windows(spec: ModelSpec, longest: int) -> ModelSpec:
    """A window that no sequence outgrows is none."""

    def useful(layer: LayerSpec) -> LayerSpec:
        mixer = layer.mixer
        if not isinstance(mixer, Gqa):
            return layer
        window, chunk = (size if size is not None and size < longest else None for size in (mixer.window, mixer.chunk))
        return replace(layer, mixer=replace(mixer, window=window, chunk=chunk))

    return replace(spec, layers=tuple(map(useful, spec.layers)))


def _values_per_key(layer: LayerSpec) -> int:
    mixer = layer.mixer
    if isinstance(mixer, Latent):
        return mixer.num_heads * (mixer.row_size + mixer.kv_rank) // 2
    return mixer.num_heads * mixer.head_size


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.get(name)
    if value not in DTYPES:
        raise fields.error(name, f"is not supported; supported: {', '.join(DTYPES)}")
    return str(value)


def _eos_token_ids(directory: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json takes precedence: chat models stop at more tokens than their config.json names."""
    generation_file = directory / "generation_config.json"
    generation = Fields.from_file(generation_file) if generation_file.exists() else fields
    source = generation if generation.has("eos_token_id") else fields
    value = source.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise source.error("eos_token_id", f"must be a token id below {vocab_size} or a list of them; correct the file")
    return tuple(dict.fromkeys(ids))
