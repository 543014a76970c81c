"""What other rooms must know of a layer, derived from its spec. Nothing else about a model's kinds leaves this room."""

from dataclasses import dataclass
from math import prod

from everserve.model.cut import cut_dense, cut_experts, slices_per_expert
from everserve.model.spec import Dense, Experts, Latent, LayerSpec, Mixer, QkNorm
from everserve.tables.calls import FfnCut

PLANES = 2  # keys and values


@dataclass(frozen=True, kw_only=True)
class KvSpec:
    """What a layer keeps of every token: for each KV head a row of `row_size` numbers in each of its planes."""

    num_heads: int
    num_planes: int  # of a head
    row_size: int


def kv_of(mixer: Mixer) -> KvSpec:
    if isinstance(mixer, Latent):
        return KvSpec(num_heads=1, num_planes=1, row_size=mixer.row_size)
    return KvSpec(num_heads=mixer.num_kv_heads, num_planes=PLANES, row_size=mixer.head_size)


def cut_of(number: int, layer: LayerSpec, cuts_experts: bool) -> FfnCut:
    """How the FFN of a layer is cut into shards. `cuts_experts`: also experts, if there are few."""
    match layer.ffn:
        case Dense(size=size, has_bias=has_bias):
            return cut_dense(number, size, has_bias)
        case Experts(number=num, size=size, has_bias=has_bias, router=router):
            slices = slices_per_expert(num, size) if cuts_experts else 1
            return cut_experts(number, num, router.top_k, size, slices, has_bias)


def home_weights(layer: LayerSpec, hidden_size: int, *, has_heads: bool, has_ffn: bool) -> dict[str, tuple[int, ...]]:
    """The weights that the home of a stream has of a layer, and their shapes: attention and norms, the router, and an
    FFN that does not cross the seam. Names as in layout.py."""
    ffn, shapes = layer.ffn, dict[str, tuple[int, ...]]()
    norms = {
        "input_norm": layer.has_input_norm,
        "attention_norm": layer.has_attention_norm,
        "ffn_norm": layer.has_ffn_norm,
        "answer_norm": layer.has_answer_norm,
    }
    shapes |= {name: (hidden_size,) for name, is_there in norms.items() if is_there}
    if has_heads:
        shapes |= _head_weights(layer.mixer, hidden_size)
    shapes["output"] = (hidden_size, attended_size(layer.mixer))
    if layer.mixer.output_bias:
        shapes["output_bias"] = (hidden_size,)
    if isinstance(ffn, Experts):
        shapes["router"] = (ffn.number, hidden_size)
        if ffn.router.has_bias:
            shapes["router_bias"] = (ffn.number,)
        if ffn.router.has_correction:
            shapes["correction"] = (ffn.number,)
        if ffn.shared is not None and ffn.shared.is_gated:
            shapes["shared_gate"] = (1, hidden_size)
    if (dense := dense_at_home(layer, has_ffn=has_ffn)) is not None:
        shapes["gate_up"], shapes["down"] = (2 * dense.size, hidden_size), (hidden_size, dense.size)
        if dense.has_bias:
            shapes["ffn_bias"] = (2 * dense.size + hidden_size,)
    return shapes


def attended_size(mixer: Mixer) -> int:
    """How many numbers all heads answer to a row."""
    return mixer.num_heads * (mixer.value_size if isinstance(mixer, Latent) else mixer.head_size)


def _head_weights(mixer: Mixer, hidden_size: int) -> dict[str, tuple[int, ...]]:
    if isinstance(mixer, Latent):
        return _latent_weights(mixer, hidden_size)
    q_size, kv_size, size = mixer.num_heads * mixer.head_size, mixer.num_kv_heads * mixer.head_size, mixer.head_size
    shapes: dict[str, tuple[int, ...]] = {"qkv": (q_size + 2 * kv_size, hidden_size)}
    if mixer.qkv_bias:
        shapes["qkv_bias"] = (q_size + 2 * kv_size,)
    if mixer.qk_norm in (QkNorm.HEAD, QkNorm.ROW):
        is_row = mixer.qk_norm is QkNorm.ROW
        shapes["q_norm"], shapes["k_norm"] = ((q_size,), (kv_size,)) if is_row else ((size,), (size,))
    if mixer.has_sinks:
        shapes["sinks"] = (mixer.num_heads,)
    return shapes


def _latent_weights(mixer: Latent, hidden_size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "q": (mixer.num_heads * mixer.query_size, mixer.q_rank or hidden_size),
        "kv_down": (mixer.row_size, hidden_size),
        "kv_norm": (mixer.kv_rank,),
        "kv_up": (mixer.num_heads * (mixer.plain_size + mixer.value_size), mixer.kv_rank),
    }
    if mixer.down_bias:
        shapes["kv_down_bias"] = (mixer.row_size,)
    if mixer.q_rank is not None:
        shapes["q_down"], shapes["q_norm"] = (mixer.q_rank, hidden_size), (mixer.q_rank,)
        if mixer.down_bias:
            shapes["q_down_bias"] = (mixer.q_rank,)
    return shapes


def dense_at_home(layer: LayerSpec, *, has_ffn: bool) -> Dense | None:
    """What the home computes of the FFN: shared experts, or all of it where it does not cross the seam."""
    if isinstance(layer.ffn, Experts):
        return layer.ffn.shared.ffn if layer.ffn.shared is not None else None
    return layer.ffn if has_ffn else None


EXACT = frozenset({"correction", "sinks"})  # weights that are float32 whatever the others are


def weights_per_token(layer: LayerSpec, hidden_size: int) -> int:
    """How many weights a token is multiplied with."""
    ffn = layer.ffn
    matrices = (shape for shape in _head_weights(layer.mixer, hidden_size).values() if len(shape) > 1)
    attention = sum(map(prod, matrices)) + hidden_size * attended_size(layer.mixer)
    if isinstance(ffn, Dense):
        return attention + 3 * hidden_size * ffn.size
    shared = ffn.shared.ffn.size if ffn.shared is not None else 0
    return attention + 3 * hidden_size * (ffn.router.top_k * ffn.size + shared)
