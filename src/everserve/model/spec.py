"""What a model computes, as data: one `LayerSpec` per layer, and what is around the layers.

Families (families/) translate the fields of a config.json into a `ModelSpec`. Nothing below knows their names: kernels
get kinds and constants from here, and three derived functions tell all other rooms what a layer needs:

    kv_of(mixer)                  keys and values of a token: sizing, pools, logs, pieces (derived.py)
    cut_of(layer, ..)             the shards of its FFN: placement, planners, memory of experts (derived.py)
    Layout.home(layer) and others where its weights lie in the files (layout.py)

One layer, from the hidden state to the next one; what is in brackets some models do not have:

    x = [input norm](hidden)                   r = hidden + scale * [norm](attention(x))
    x = [FFN norm](r), or as before            hidden = r + scale * [norm](shared(x) + FFN(x))

Kinds that are to come have their place: another mixer beside `Gqa` and `Latent` (a recurrent layer keeps a state),
several residual streams in `LayerSpec`. Codecs of weights are below all of this (codecs.py).
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `kind` says which of the other fields mean something."""

    kind: str  # default | linear | llama3 | yarn | longrope
    theta: float
    factor: float = 1.0  # linear, llama3, yarn, longrope
    original_max_positions: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn, as are the five below
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: derived from the factor; longrope too
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope: of each pair, while no sequence is longer than the original
    long_factors: tuple[float, ...] = ()  # longrope: where one may be


@dataclass(frozen=True, kw_only=True)
class Norm:
    """x / sqrt(mean(x * x) + eps) * (weight + offset) * scale. `is_centred`: of x minus its mean (LayerNorm)."""

    eps: float
    is_centred: bool = False
    offset: float = 0.0
    scale: float = 1.0


class QkNorm(StrEnum):
    """How q and k are normed before they meet."""

    NONE = "none"
    HEAD = "head"  # each head by itself, all with the same weights
    ROW = "row"  # all heads of q together, and all of k: no head can be computed alone
    UNIT = "unit"  # each head by itself, without weights


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """q is multiplied with 1 + beta * log(1 + floor((position + ahead) / every)): attention stays sharp over long
    contexts."""

    every: int
    beta: float
    ahead: int = 0


@dataclass(frozen=True, kw_only=True)
class Gqa:
    """Attention whose KV heads are shared by as many query heads each."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float  # of scores
    rope: RopeConfig | None  # None: positions do not matter
    rotary_size: int  # the first values of a head that are rotated; 0 without rope
    is_interleaved: bool = False  # neighbours are pairs, instead of values half of the rotary size apart
    window: int | None = None  # keys that a row sees, its own included
    chunk: int | None = None  # a row sees the keys of its own chunk of so many positions
    has_sinks: bool = False  # a score of each query head that no value belongs to
    softcap: float | None = None  # scores are softcap * tanh(score / softcap)
    qk_norm: QkNorm = QkNorm.NONE
    norms_after_rope: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    temperature: Temperature | None = None


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention whose heads share one latent row of each token (MLA): what is kept is c = norm(the first `kv_rank`
    values of A x) and k = rotated(the rest). A head has two matrices over c, for keys and for values:

        score of head h = scale * ((K_h^T q_h) . c + rotated(q'_h) . k)
        answer of head h = V_h (sum of weights * c)

    where q_h and q'_h are what a head has of Q x, or of Q norm(B x). So keys and values are never made of c: the first
    product of a head is applied to q instead, and the second one to the sum, in prompts as for single tokens."""

    num_heads: int
    q_rank: int | None  # rows of B; None: there is no B
    kv_rank: int
    plain_size: int  # of q_h
    rotary_size: int  # of q'_h, and of k
    value_size: int  # of a head's answer
    scale: float
    rope: RopeConfig
    is_interleaved: bool = True  # neighbours are pairs
    norm_eps: float = 1e-6  # of the norms of c and of B x
    down_bias: bool = False  # of A and B
    output_bias: bool = False

    @property
    def query_size(self) -> int:
        return self.plain_size + self.rotary_size

    @property
    def row_size(self) -> int:
        """What is kept of a token."""
        return self.kv_rank + self.rotary_size

    @property
    def window(self) -> None:
        """Every row sees everything."""

    @property
    def chunk(self) -> None:
        """Likewise."""


Mixer = Gqa | Latent


class ActivationKind(StrEnum):
    """What is done with gate x before it meets up x."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    CLAMPED_SWIGLU = "clamped_swiglu"  # gate and up at most `limit`, silu with `alpha`, up + 1


@dataclass(frozen=True, kw_only=True)
class Activation:
    kind: ActivationKind = ActivationKind.SILU
    alpha: float = 1.0
    limit: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Dense:
    """down(activation(gate x) * up x)."""

    size: int
    activation: Activation = Activation()
    has_bias: bool = False
    has_gate: bool = True  # else the gate is `up`: relu(up x) * up x is the square of relu


class Score(StrEnum):
    """What the router makes of logits."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"  # experts are chosen by their logits


@dataclass(frozen=True, kw_only=True)
class Router:
    """Which experts a row goes to, and with which weights.

    The best K by score + correction, of the best groups where there are groups (a group is as good as the sum of its
    best experts, `counted` of them, or fewer if the others are masked; one without any expert that is left is never
    chosen). Their weights are the scores, over their sum if `renormalise`, times `scale`."""

    top_k: int
    score: Score = Score.SOFTMAX
    has_bias: bool = False  # of logits
    has_correction: bool = False  # float32, never narrowed
    num_groups: int = 1
    groups_kept: int = 1
    counted: int = 2  # 1 or 2
    renormalise: bool = False
    least_sum: float = 0.0  # no smaller one is divided by
    scale: float = 1.0
    weighs_input: bool = False  # the row is multiplied with its weight before the expert, not the answer behind it


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Experts that every row goes to, as one FFN. `is_gated`: its answer has the weight sigmoid(gate x)."""

    ffn: Dense
    is_gated: bool = False


@dataclass(frozen=True, kw_only=True)
class Experts:
    number: int
    size: int
    router: Router
    activation: Activation = Activation()
    has_bias: bool = False
    shared: Shared | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer; the formulas are above."""

    mixer: Mixer
    ffn: Dense | Experts
    norm: Norm  # what all norms of the layer do
    has_input_norm: bool = True
    has_attention_norm: bool = False  # of what attention adds
    has_ffn_norm: bool = True
    is_parallel: bool = False  # the FFN reads what attention reads
    has_answer_norm: bool = False  # of what the FFN adds
    residual_scale: float = 1.0  # of what is added


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A whole model. `embedding_scale`: `is_rounded` to the dtype of the weights, as where the model was trained."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: Norm  # a scale of logits is here
    embedding_scale: float = 1.0
    embedding_scale_is_rounded: bool = False
    logits_softcap: float | None = None
