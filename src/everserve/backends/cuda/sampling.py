"""Warm-up: every way of choosing a token once.

On a device a kernel is loaded, and a Triton kernel compiled, when it is first used. This takes a while, and may wait
for all kernels that run. A worker with only greedy streams so far would otherwise do that in the middle of a
failover, with the first sampled stream that it takes over.
"""

import torch

from everserve.backends.cuda.device import Device
from everserve.model.penalties import Penalties
from everserve.model.sampling import GREEDY, SamplingRow, sample
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens

_PENALISED = SamplingParams(
    max_tokens=2,
    min_tokens=2,
    stop_ids=(0,),
    temperature=0.0,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    logprobs=1,
)
_DRAWN = SamplingParams(max_tokens=2, temperature=0.7, logprobs=0)


def rehearse_sampling(device: Device) -> None:
    """One kernel draws, whatever is filtered; those of torch that report probabilities may differ for one row and for
    several."""
    ops, vocab_size = device.ops, device.model.vocab_size
    logits_LV = torch.zeros(2, vocab_size, device=device.torch_device)
    ops.choose(logits_LV, [GREEDY] * len(logits_LV))
    for params in ([_DRAWN], [_PENALISED, _DRAWN]):
        sample(ops, logits_LV[: len(params)], [_row(each) for each in params])


def _row(params: SamplingParams) -> SamplingRow:
    penalties = Penalties.of(RequestSpec(id="rehearsal", prompt=as_tokens([0]), params=params))
    if penalties is not None:
        penalties.count(0)
    return SamplingRow(params, index=1, penalties=penalties)
