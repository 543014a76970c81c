"""Which tensor of which architecture is which weight of ours.

`Layout` finds the tensors by the names that a family gives them, and says what shapes they must have; `check_headers`
compares that with the files' headers before anything starts. Experts come in two formats, and we read both:

    one by one   mlp.experts.7.gate_proj.weight [F, D], up_proj [F, D], down_proj [D, F]     the hub's files
    stacked      mlp.experts.gate_up_proj [N, 2F, D], mlp.experts.down_proj [N, D, F]        transformers 5, on request

A weight may be some rows of a tensor (fused projections), every other one (gate and up in turns), a transposed one, or
rows in another order: rotary embedding takes values half of a head apart, so where files mean neighbours their rows of
q and k are sorted. That changes the order of what is computed, and no number.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Protocol

from everserve.errors import ModelError
from everserve.model.config import DTYPES, ModelConfig
from everserve.model.families import BY_ARCHITECTURE
from everserve.model.families.names import Names
from everserve.model.headers import Headers
from everserve.model.packed import Packed
from everserve.model.spec import Dense, Experts, Gqa, Latent, LayerSpec, QkNorm
from everserve.tables.calls import ShardKind

_MOST_COUNTED = 100_000  # tensors that are missing


@dataclass(frozen=True)
class Pairs:
    """An order of rows: of each head of `size` rows `rotated` from the `first` on, first all that are even, then all
    that are odd.
    """

    size: int
    rotated: int
    first: int = 0

    def order(self, num_rows: int) -> list[int]:
        """Which row comes where."""
        at, end = self.first, self.first + self.rotated
        head = [*range(at), *range(at, end, 2), *range(at + 1, end, 2), *range(end, self.size)]
        return [first + row for first in range(0, num_rows, self.size) for row in head]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one weight of ours lies: a tensor of the checkpoint, which must have this shape, or a part of it. First a
    plane is chosen, then it is transposed, then rows and columns are."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    plane: int | None = None
    is_transposed: bool = False
    rows: slice | None = None
    columns: slice | None = None
    pairs: Pairs | None = None  # rows in another order; with `rows`, of whole heads
    is_exact: bool = False  # float32, however narrow other weights are made

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what is loaded."""
        shape = list(self.shape if self.plane is None else self.shape[1:])
        if self.is_transposed:
            shape.reverse()
        for axis, part in enumerate((self.rows, self.columns)):
            if part is not None:
                shape[axis] = len(range(*part.indices(shape[axis])))
        return tuple(shape)

    def some_rows(self, first: int, num: int) -> "Source":
        """The source of these rows, `num` from the `first` on."""
        rows = range(*self.rows.indices(1 << 40)) if self.rows is not None else range(1 << 40)
        part = rows[first : first + num]
        return replace(self, rows=slice(part.start, part.stop, part.step))

    def some_columns(self, first: int, num: int) -> "Source":
        assert self.columns is None
        return replace(self, columns=slice(first, first + num))


@dataclass(frozen=True, kw_only=True)
class FeedForwardSources:
    """The three matrices of an expert, of a dense FFN, or of a slice of one; and their biases, or none of them. The
    last bias is None in all slices but the first: it is added once."""

    gate: Source
    up: Source
    down: Source
    biases: tuple[Source, Source, Source | None] | None = None

    def slice(self, number: int, size: int) -> "FeedForwardSources":
        """Slice `number` of slices of this size."""
        first, biases = number * size, None
        if self.biases is not None:
            gate, up, down = self.biases
            biases = gate.some_rows(first, size), up.some_rows(first, size), down if number == 0 else None
        return FeedForwardSources(
            gate=self.gate.some_rows(first, size),
            up=self.up.some_rows(first, size),
            down=self.down.some_columns(first, size),
            biases=biases,
        )

    @property
    def matrices(self) -> tuple[Source, Source, Source]:
        return self.gate, self.up, self.down

    def __iter__(self) -> Iterator[Source]:
        yield from self.matrices
        yield from (bias for bias in self.biases or () if bias is not None)


@dataclass(frozen=True, kw_only=True)
class HeadSources:
    """One KV head of a layer with its query heads: parts of q, k and v, and what all heads of the layer share."""

    qkv: tuple[Source, Source, Source]
    qkv_bias: tuple[Source, ...]
    sinks: Source | None
    q_norm: Source | None
    k_norm: Source | None


class Named(Protocol):
    """What has names of tensors: files' headers, a checkpoint."""

    def names(self) -> frozenset[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...


class Layout:
    """The sources of all weights of one model, in the format that its checkpoint uses."""

    def __init__(self, config: ModelConfig, *, stacked_experts: bool, place: "Place | None" = None) -> None:
        """`place`: where in the files the model is; by itself, unless it is given."""
        self.config = config
        self.family = BY_ARCHITECTURE[config.architecture]
        names = self.family.names
        self._stacked = stacked_experts or names.is_stacked
        if stacked_experts and not names.is_stacked:
            names = replace(names, **names.when_stacked)  # type: ignore[arg-type]
        self.names: Names = names
        self._place = place or _PLACES[0]
        self.home = cache(self._home)

    @classmethod
    def of(cls, config: ModelConfig, files: Named) -> "Layout":
        family, present = BY_ARCHITECTURE[config.architecture], files.names()
        suffix = f".{family.names.stacked.gate_up}"
        has_stacked = any(name.endswith(suffix) for name in present)
        places = (place for place in _PLACES if place(family.names.embedding) in present)
        found = cls(config, stacked_experts=has_stacked, place=next(places, None))
        return found._as_written(files) if family.names.stacked.may_be_plain and config.moe_layers else found

    def _as_written(self, files: Named) -> "Layout":
        """Where files of a family have stacks in both directions, their shapes tell."""
        source = self.expert(self.config.moe_layers[0], 0).down
        num, rows, columns = source.shape
        if source.name in files.names() and files.shape(source.name) == (num, columns, rows):
            self.names = replace(self.names, stacked=replace(self.names.stacked, is_transposed=False))
        return self

    # -- around the layers -------------------------------------------------------------------------

    def _source(self, name: str, *shape: int) -> Source:
        return Source(name=self._place(name), shape=shape)

    @property
    def embedding(self) -> Source:
        return self._source(self.names.embedding, self.config.vocab_size, self.config.hidden_size)

    @property
    def final_norm(self) -> Source:
        return self._source(self.names.final_norm, self.config.hidden_size)

    @property
    def lm_head(self) -> Source:
        if self.config.tie_word_embeddings:
            return self.embedding
        return self._source(self.names.lm_head, self.config.vocab_size, self.config.hidden_size)

    @property
    def lm_head_name(self) -> str:
        """The head's name, also where it is the embedding."""
        return self._place(self.names.lm_head)

    @property
    def is_part(self) -> bool:
        """Whether the files hold more than this model: what makes something of images, for instance."""
        return self._place is not _PLACES[0]

    # -- the home's half of a layer ----------------------------------------------------------------

    def _home(self, layer: int) -> dict[str, tuple[Source, ...]]:
        """The sources of each weight that a home has, by the names of `ModelConfig.home_weights`, but for heads and
        the FFN even where these are elsewhere. Several are merged, one behind the other."""
        c, spec, weight = self.config, self.config.layers[layer], partial(self._of_layer, layer)
        names, hidden = self.names, c.hidden_size
        found: dict[str, tuple[Source, ...]] = {
            name: (weight(getattr(names, name), hidden),)
            for name in ("input_norm", "attention_norm", "ffn_norm", "answer_norm")
            if getattr(spec, f"has_{name}")
        }
        mixer = spec.mixer
        found |= self._latent(layer, mixer) if isinstance(mixer, Latent) else self._attention(layer, mixer)
        if isinstance(spec.ffn, Experts):
            found |= self._router(layer, spec.ffn)
        dense = self._dense_sources(layer, spec)
        if dense is not None:
            found["gate_up"], found["down"] = (dense.gate, dense.up), (dense.down,)
            if dense.biases is not None:
                found["ffn_bias"] = tuple(bias for bias in dense.biases if bias is not None)
        return found

    def _of_layer(self, layer: int, name: str, *shape: int) -> Source:
        return self._source(self.names.layer.format(i=layer) + name, *shape)

    def _attention(self, layer: int, mixer: Gqa) -> dict[str, tuple[Source, ...]]:
        names, hidden, weight = self.names, self.config.hidden_size, partial(self._of_layer, layer)
        q_size, kv_size = mixer.num_heads * mixer.head_size, mixer.num_kv_heads * mixer.head_size
        found = {
            "qkv": self._qkv(layer, mixer, "weight"),
            "output": (weight(f"{names.output}.weight", hidden, q_size),),
        }
        if mixer.qkv_bias:
            found["qkv_bias"] = self._qkv(layer, mixer, "bias")
        if mixer.output_bias:
            found["output_bias"] = (weight(f"{names.output}.bias", hidden),)
        if mixer.has_sinks:
            found["sinks"] = (replace(weight(names.sinks, mixer.num_heads), is_exact=True),)
        if mixer.qk_norm in (QkNorm.HEAD, QkNorm.ROW):
            is_row = mixer.qk_norm is QkNorm.ROW
            sizes = (q_size, kv_size) if is_row else (mixer.head_size, mixer.head_size)
            for name, size in zip(("q_norm", "k_norm"), sizes, strict=True):
                found[name] = (replace(weight(getattr(names, name), size), pairs=_pairs(mixer)),)
        return found

    def _latent(self, layer: int, mixer: Latent) -> dict[str, tuple[Source, ...]]:
        names, hidden, weight = self.names, self.config.hidden_size, partial(self._of_layer, layer)
        q_rows, up_rows = mixer.query_size, mixer.plain_size + mixer.value_size
        q_pairs = kv_pairs = None
        if mixer.is_interleaved:
            q_pairs = Pairs(q_rows, mixer.rotary_size, first=mixer.plain_size)
            kv_pairs = Pairs(mixer.row_size, mixer.rotary_size, first=mixer.kv_rank)
        q_name = names.q if mixer.q_rank is None else names.q_up
        q = weight(f"{q_name}.weight", mixer.num_heads * q_rows, mixer.q_rank or hidden)
        found: dict[str, tuple[Source, ...]] = {
            "q": (replace(q, pairs=q_pairs),),
            "kv_down": (replace(weight(f"{names.kv_down}.weight", mixer.row_size, hidden), pairs=kv_pairs),),
            "kv_norm": (weight(names.kv_norm, mixer.kv_rank),),
            "kv_up": (weight(f"{names.kv_up}.weight", mixer.num_heads * up_rows, mixer.kv_rank),),
            "output": (weight(f"{names.output}.weight", hidden, mixer.num_heads * mixer.value_size),),
        }
        if mixer.q_rank is not None:
            found["q_down"] = (weight(f"{names.q_down}.weight", mixer.q_rank, hidden),)
            found["q_norm"] = (weight(names.q_down_norm, mixer.q_rank),)
            if mixer.down_bias:
                found["q_down_bias"] = (weight(f"{names.q_down}.bias", mixer.q_rank),)
        if mixer.down_bias:
            found["kv_down_bias"] = (replace(weight(f"{names.kv_down}.bias", mixer.row_size), pairs=kv_pairs),)
        if mixer.output_bias:
            found["output_bias"] = (weight(f"{names.output}.bias", hidden),)
        return found

    def _qkv(self, layer: int, mixer: Gqa, what: str) -> tuple[Source, Source, Source]:
        """The sources of weights or biases; parts of one tensor, or tensors of their own."""
        sizes = [num * mixer.head_size for num in (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads)]
        columns = (self.config.hidden_size,) if what == "weight" else ()
        names, pairs = self.names, _pairs(mixer)
        if names.qkv:
            whole = self._of_layer(layer, f"{names.qkv}.{what}", sum(sizes), *columns)
            q, k, v = (whole.some_rows(sum(sizes[:i]), size) for i, size in enumerate(sizes))
        else:
            modules = zip((names.q, names.k, names.v), sizes, strict=True)
            q, k, v = (self._of_layer(layer, f"{module}.{what}", size, *columns) for module, size in modules)
        return replace(q, pairs=pairs), replace(k, pairs=pairs), v

    def _router(self, layer: int, ffn: Experts) -> dict[str, tuple[Source, ...]]:
        names, weight, num = self.names, partial(self._of_layer, layer), ffn.number
        found: dict[str, tuple[Source, ...]] = {"router": (weight(names.router, num, self.config.hidden_size),)}
        if ffn.router.has_bias:
            found["router_bias"] = (weight(names.router_bias, num),)
        if ffn.router.has_correction:
            shape = (*names.correction_shape, num)
            plane = 0 if names.correction_shape else None
            found["correction"] = (replace(weight(names.correction, *shape), plane=plane, is_exact=True),)
        if ffn.shared is not None and ffn.shared.is_gated:
            found["shared_gate"] = (weight(names.shared_weight, 1, self.config.hidden_size),)
        return found

    def head(self, layer: int, head: int) -> HeadSources:
        """Consecutive query heads share a KV head, so each part is a slice of rows."""
        mixer, whole = self.config.layers[layer].mixer, self.home(layer)
        assert isinstance(mixer, Gqa), "only these have heads of their own"
        group, size = mixer.num_heads // mixer.num_kv_heads, mixer.head_size

        def part(sources: tuple[Source, ...]) -> Iterator[Source]:
            for source, num_rows in zip(sources, (group * size, size, size), strict=True):
                yield source.some_rows(head * num_rows, num_rows)

        def one(name: str) -> Source | None:
            return whole[name][0] if name in whole else None

        q, k, v = part(whole["qkv"])
        sinks = one("sinks")
        return HeadSources(
            qkv=(q, k, v),
            qkv_bias=tuple(part(whole["qkv_bias"])) if "qkv_bias" in whole else (),
            sinks=sinks.some_rows(head * group, group) if sinks is not None else None,
            q_norm=one("q_norm"),
            k_norm=one("k_norm"),
        )

    # -- FFNs --------------------------------------------------------------------------------------

    def dense(self, layer: int) -> FeedForwardSources:
        """The FFN of a layer without experts, or what experts share."""
        sources = self._dense_sources(layer, self.config.layers[layer])
        assert sources is not None, f"layer {layer} has no FFN but its experts"
        return sources

    def _dense_sources(self, layer: int, spec: LayerSpec) -> FeedForwardSources | None:
        names = self.names
        if isinstance(spec.ffn, Dense):
            return self._feed_forward(layer, (names.gate, names.up, names.down), spec.ffn.size, spec.ffn.has_bias)
        if spec.ffn.shared is None:
            return None
        modules, dense = (names.shared_gate, names.shared_up, names.shared_down), spec.ffn.shared.ffn
        return self._feed_forward(layer, modules, dense.size, dense.has_bias)

    def shard(self, layer: int, shard: int) -> FeedForwardSources:
        """One shard of a layer's FFN, as the model is cut (model/cut.py)."""
        cut = self.config.cut(layer)
        if cut.kind is ShardKind.SLICE:
            return self.dense(layer).slice(shard, cut.shard_size)
        expert, part = divmod(shard, cut.slices_per_expert)
        whole = self.expert(layer, expert)
        return whole.slice(part, cut.shard_size) if cut.slices_per_expert > 1 else whole

    def expert(self, layer: int, expert: int) -> FeedForwardSources:
        names, ffn = self.names, self.config.layers[layer].ffn
        assert isinstance(ffn, Experts), f"layer {layer} has no experts"
        if self._stacked:
            return self._stacked_expert(layer, expert, ffn)
        modules = (name.format(e=expert) for name in (names.expert_gate, names.expert_up, names.expert_down))
        return self._feed_forward(layer, tuple(modules), ffn.size, ffn.has_bias)

    def _stacked_expert(self, layer: int, expert: int, ffn: Experts) -> FeedForwardSources:
        stacked, hidden, num, size = self.names.stacked, self.config.hidden_size, ffn.number, ffn.size
        gate_rows = slice(0, 2 * size, 2) if stacked.alternates else slice(0, size)
        up_rows = slice(1, 2 * size, 2) if stacked.alternates else slice(size, 2 * size)

        def source(name: str, rows: int, columns: int) -> Source:
            shape = (num, columns, rows) if stacked.is_transposed else (num, rows, columns)
            found = self._of_layer(layer, name, *shape)
            return replace(found, plane=expert, is_transposed=stacked.is_transposed)

        gate_up, down = source(stacked.gate_up, 2 * size, hidden), source(stacked.down, hidden, size)
        biases = None
        if ffn.has_bias:
            bias = replace(self._of_layer(layer, f"{stacked.gate_up}_bias", num, 2 * size), plane=expert)
            down_bias = replace(self._of_layer(layer, f"{stacked.down}_bias", num, hidden), plane=expert)
            biases = replace(bias, rows=gate_rows), replace(bias, rows=up_rows), down_bias
        return FeedForwardSources(
            gate=replace(gate_up, rows=gate_rows), up=replace(gate_up, rows=up_rows), down=down, biases=biases
        )

    def _feed_forward(self, layer: int, modules: tuple[str, ...], size: int, has_bias: bool) -> FeedForwardSources:
        gate, up, down = modules
        hidden, weight = self.config.hidden_size, partial(self._of_layer, layer)
        down_source = weight(f"{down}.weight", hidden, size)
        if self.names.gate_up and gate == self.names.gate:
            both = weight(f"{self.names.gate_up}.weight", 2 * size, hidden)
            return FeedForwardSources(gate=both.some_rows(0, size), up=both.some_rows(size, size), down=down_source)
        gate = gate or up  # without a gate `up` is its own
        biases = None
        if has_bias:
            biases = weight(f"{gate}.bias", size), weight(f"{up}.bias", size), weight(f"{down}.bias", hidden)
        return FeedForwardSources(
            gate=weight(f"{gate}.weight", size, hidden),
            up=weight(f"{up}.weight", size, hidden),
            down=down_source,
            biases=biases,
        )

    # -- all of them -------------------------------------------------------------------------------

    def all_sources(self) -> Iterator[Source]:
        """Every weight of the model."""
        yield from (self.embedding, self.final_norm, self.lm_head)
        for layer in range(self.config.num_layers):
            for sources in self.home(layer).values():
                yield from sources
            ffn = self.config.layers[layer].ffn
            for expert in range(ffn.number if isinstance(ffn, Experts) else 0):
                yield from self.expert(layer, expert)


def _pairs(mixer: Gqa) -> Pairs | None:
    return Pairs(mixer.head_size, mixer.rotary_size) if mixer.is_interleaved and mixer.rotary_size else None


# From the names of a model that is alone in its files to those where it is the text part of a larger one.
Place = Callable[[str], str]
_PLACES: tuple[Place, ...] = (
    lambda name: name,
    lambda name: f"language_model.{name}",
    lambda name: re.sub(r"^model\.", "model.language_model.", name),
)


_OF_IMAGES = r"(model\.)?(vision_tower|vision_model|vision_embed_tokens|multi_modal_projector|visual|audio_tower)\."


def check_headers(config: ModelConfig, headers: Headers) -> None:
    """Raise ModelError unless the files hold exactly the tensors that the config calls for. Ends at the first that they
    do not: a config may call for any number."""
    expected, present = set[str](), headers.names()
    layout = Layout.of(config, headers)
    sources = layout.all_sources()
    for source in sources:
        if source.name not in present:
            missing = {source.name, *(other.name for other in islice(sources, _MOST_COUNTED))} - present
            number = f"{len(missing)}" if len(missing) <= _MOST_COUNTED else f"more than {_MOST_COUNTED}"
            raise ModelError(
                f"{headers.path} lacks tensor {source.name} ({number} missing in all); "
                "the download is incomplete or config.json is another model's"
            )
        _check_entry(headers, source)
        expected.add(source.name)
    # A weight that we would leave out changes the model. Old files carry rotary tables, which we compute; a tied
    # model may carry its embedding twice (tied_head.py).
    for name in sorted(present - expected):
        if (
            not name.endswith("rotary_emb.inv_freq")
            and name != layout.lm_head_name
            and not _is_unused(layout, name, present)
            and not _is_idle_bias(headers, name)
        ):
            raise ModelError(
                f"{headers.path} holds tensor {name}, which {config.architecture} with this config.json "
                "does not use; one of the two is another model's"
            )


def _is_unused(layout: Layout, name: str, present: frozenset[str]) -> bool:
    """What the family says that it has no use for."""
    family = layout.family
    if any(re.fullmatch(pattern, name) for pattern in family.unused):
        return True
    if layout.is_part and re.match(_OF_IMAGES, name):
        return True
    found = re.match(r"model\.layers\.(\d{1,4})\.", name) if family.next_layers else None
    # Layers that guess further tokens are behind the last one, and are told from others by this projection.
    return found is not None and int(found[1]) >= layout.config.num_layers and f"{found[0]}eh_proj.weight" in present


def _is_idle_bias(headers: Headers, name: str) -> bool:
    """GPTQ's tools gave every layer a bias: zeros, where the model has none."""
    module = name.removesuffix(".bias")
    return module != name and isinstance(headers.coded.get(f"{module}.weight"), Packed) and headers.is_zero(name)


def _check_entry(headers: Headers, source: Source) -> None:
    shape, dtype = headers.shape(source.name), headers.dtype(source.name)
    if shape != source.shape:
        raise ModelError(
            f"{headers.path}: tensor {source.name} has shape {list(shape)}, "
            f"but config.json calls for {list(source.shape)}; one of the two is another model's"
        )
    if dtype not in DTYPES:
        raise ModelError(
            f"{headers.path}: tensor {source.name} is {dtype}, "
            f"which is not supported; convert the weights to one of {', '.join(DTYPES)}"
        )
