"""Every way of choosing a token once, for nobody.

On a device torch loads each of its kernels when it is first used, which takes a while, and may wait for everything that
runs. A worker whose streams were all greedy so far would do that in the middle of a failover, with the first stream of
another kind that it takes over.
"""

import torch

from everserve.model.penalties import Penalties
from everserve.model.sampling import GREEDY, SamplingRow, sample
from everserve.tables.requests import RequestSpec, SamplingParams
from everserve.worker.cuda_build import Device

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
_FILTERED = SamplingParams(max_tokens=2, temperature=0.7, top_p=0.9, top_k=2, min_p=0.01, logprobs=0)
_FREE = SamplingParams(max_tokens=2, temperature=1.0)


def rehearse_sampling(device: Device) -> None:
    """Some kernels differ for one row and for several."""
    ops, vocab_size = device.ops, device.model.vocab_size
    logits_LV = torch.zeros(3, vocab_size, device=device.torch_device)
    ops.choose(logits_LV, [GREEDY] * len(logits_LV))
    for params in ([_FREE], [_FREE, _FREE], [_FILTERED], [_PENALISED, _FILTERED, _FREE]):
        sample(ops, logits_LV[: len(params)], [_row(each) for each in params])


def _row(params: SamplingParams) -> SamplingRow:
    penalties = Penalties.of(RequestSpec(id="rehearsal", prompt=[0], params=params))
    if penalties is not None:
        penalties.count(0)
    return SamplingRow(params, index=1, penalties=penalties)
