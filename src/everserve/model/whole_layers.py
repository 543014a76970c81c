"""A layer as a list of steps, which ops walk one by one in Python, or all at once where a backend has something quicker
(backends/cpu/whole_layers.py, csrc/ops/layers.c). What a layer does is said here and nowhere else.

Steps hand rows to each other in registers:

    most models     NORM    hidden -> normed              OLMo 2, EXAONE 4    (no norm)
                    HEADS   normed -> attended                                hidden -> attended
                    PROJECT attended, hidden -> residual, normed              likewise, the output is normed first
                    SEAM    normed, residual -> hidden                        residual -> answer
                                                                   JOIN       answer, residual -> hidden

    PROJECT   the output of attention joins the residual; then the norm of that, or as it goes into products
    DENSE     an FFN of the home: of a layer that does not cross the seam, or shared experts
    SEAM      the router, or all slices of a dense FFN; what crosses the seam, and the sum of the answers
    JOIN      a sum that is normed before it joins the residual
"""

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from everserve.model.batch import StepBatch
from everserve.model.masks import ExpertMasks
from everserve.model.quantised import Matrix
from everserve.model.rope import Rotation
from everserve.model.spec import Experts as ExpertsSpec
from everserve.model.spec import LayerSpec, Norm, Router
from everserve.seam.experts import Experts

if TYPE_CHECKING:  # ops.py names what is declared here
    from everserve.model.ops import ExpertSlots, RouterWeights, Scores


class Register(IntEnum):
    """Rows of a step, hidden_size wide, but for what heads answer."""

    NONE = -1
    HIDDEN = 0  # of the layer before, and for the next one
    NORMED = 1
    RESIDUAL = 2
    ANSWER = 3  # of the FFN, where it does not simply join the residual
    ATTENDED = 4


class StepKind(IntEnum):
    NORM = 0
    HEADS = 1
    PROJECT = 2
    DENSE = 3
    SEAM = 4
    JOIN = 5


class Step(NamedTuple):
    """`into` = what the step makes of `x`, and of `residual` if there is one. `norm`: the weights of a norm of what it
    makes, before that joins the residual. `following`: the weights of a norm behind that, into `normed`."""

    kind: StepKind
    x: Register
    into: Register
    residual: Register = Register.NONE
    norm: str = ""
    normed: Register = Register.NONE
    following: str = ""


def steps_of(layer: LayerSpec, *, crosses_seam: bool) -> tuple[Step, ...]:
    """The whole layer."""
    hidden, normed, residual, answer = Register.HIDDEN, Register.NORMED, Register.RESIDUAL, Register.ANSWER
    x = normed if layer.has_input_norm else hidden
    steps = [Step(StepKind.NORM, hidden, normed, norm="input_norm")] if layer.has_input_norm else []
    steps.append(Step(StepKind.HEADS, x, Register.ATTENDED))
    steps.append(
        Step(
            StepKind.PROJECT,
            Register.ATTENDED,
            residual,
            residual=hidden,
            norm="attention_norm" if layer.has_attention_norm else "",
            normed=Register.NONE if layer.is_parallel else normed,
            following="ffn_norm" if layer.has_ffn_norm else "",
        )
    )
    has_shared = isinstance(layer.ffn, ExpertsSpec) and layer.ffn.shared is not None
    # What is normed before it joins the residual is summed up by itself.
    base, into = (Register.NONE, answer) if layer.has_answer_norm else (residual, hidden)
    if has_shared:
        steps.append(Step(StepKind.DENSE, normed, answer, residual=base))
        base = answer
    steps.append(Step(StepKind.SEAM if crosses_seam else StepKind.DENSE, normed, into, residual=base))
    if layer.has_answer_norm:
        steps.append(Step(StepKind.JOIN, answer, hidden, residual=residual, norm="answer_norm"))
    return tuple(steps)


class LayerWeights(NamedTuple):
    """All that a layer with its heads needs of the model, up to the seam (attention_half.py)."""

    steps: tuple[Step, ...]
    norms: dict[str, Tensor]  # by the names in steps
    norm: Norm  # what all of them do
    qkv_XD: Matrix
    qkv_bias_X: Tensor | None
    rotation: Rotation
    scores: "Scores"
    output_DX: Matrix
    output_bias_D: Tensor | None
    residual_scale: float
    answer_scale: float  # of shards, and of `dense`
    router: Router | None  # None: every row goes to all slices
    router_weights: "RouterWeights | None"
    num_slices: int  # of an expert; without a router, of the FFN
    dense: "ExpertSlots | None"  # the FFN of a layer that does not cross the seam, or shared experts
    dense_gate_1D: Tensor | None
    crosses_seam: bool


class WholeLayers(Protocol):
    """What `Decoder.run` does with all layers, if heads are here. The same bits as op by op."""

    def __call__(
        self, hidden_TD: Tensor, batch: StepBatch, kv_pool: Tensor, experts: Experts, masks: ExpertMasks
    ) -> Tensor:
        """hidden_TD behind the last layer. The one that is given may be written to."""
