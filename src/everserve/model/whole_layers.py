"""Whole layers at once, where a backend has something quicker than op by op (backends/cpu/whole_layers.py)."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from everserve.model.batch import StepBatch
from everserve.model.masks import ExpertMasks
from everserve.model.rope import Rotation
from everserve.seam.experts import Experts

if TYPE_CHECKING:  # ops.py names what is declared here
    from everserve.model.ops import ExpertSlots


class LayerWeights(NamedTuple):
    """All that a layer with its heads needs of the model, up to the seam (attention_half.py)."""

    input_norm_D: Tensor
    qkv_XD: Tensor
    qkv_bias_X: Tensor | None
    rotation: Rotation
    scale: float  # of scores
    output_DX: Tensor
    output_bias_D: Tensor | None
    post_norm_D: Tensor
    eps: float
    router_ND: Tensor | None  # None: every row goes to all slices
    top_k: int  # experts per token; 1 without a router
    renormalise: bool
    num_slices: int  # of an expert; without a router, of the FFN
    dense: "ExpertSlots | None"  # the FFN of a layer that does not cross the seam


class WholeLayers(Protocol):
    """What `Decoder.run` does with all layers, if heads are here. The same bits as op by op."""

    def __call__(
        self, hidden_TD: Tensor, batch: StepBatch, kv_pool: Tensor, experts: Experts, masks: ExpertMasks
    ) -> Tensor:
        """hidden_TD behind the last layer. The one that is given may be written to."""
