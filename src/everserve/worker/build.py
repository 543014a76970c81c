"""From a StartWorker message to an engine with its weights loaded."""

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from everserve.datapath.local import LocalExperts
from everserve.engine.engine import Engine, EngineConfig
from everserve.errors import ConfigError
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.decoder import Decoder
from everserve.model.expert_half import ExpertHalf
from everserve.model.layout import check_checkpoint
from everserve.model.ops import Ops
from everserve.model.ops.select import select_ops
from everserve.plan.sizing import num_kv_blocks
from everserve.runtime.messages import StartWorker
from everserve.tables.requests import RequestSpec, SamplingParams

log = logging.getLogger(__name__)

_SAY_PROGRESS_EVERY_S = 3.0


@dataclass(frozen=True)
class Built:
    """An engine ready to serve, and what others need to know of it."""

    engine: Engine
    model: ModelConfig
    ops: Ops


def build(start: StartWorker) -> Built:
    """Check everything that can be checked from headers first, then load. Raises UserError with one clear line."""
    model = ModelConfig.from_directory(Path(start.model))
    checkpoint = Checkpoint.open(Path(start.model))
    check_checkpoint(model, checkpoint)
    max_model_len = resolve_max_model_len(start.max_model_len, model.max_position_embeddings)

    torch.set_num_threads(1)  # the ops have their own threads; two pools would fight for the cores
    torch.set_grad_enabled(False)
    ops = select_ops(model, start.num_threads, start.batch_invariant)
    decoder = Decoder(model, checkpoint, ops, max_model_len, start.dtype, progress=_Progress("layers"))
    experts = ExpertHalf(model, checkpoint, ops, num_slots=model.num_experts, dtype=start.dtype)
    experts.load_all(progress=_Progress("experts"))
    expert_io = LocalExperts(experts)

    num_blocks = _size_pool(start, decoder, max_model_len)
    # Not zeroed: pages are only touched, and paid for, as streams need them.
    kv_pool = torch.empty(decoder.kv_shape(num_blocks, start.block_size), dtype=decoder.kv_dtype, device=ops.device)
    engine = Engine(
        EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=start.max_num_seqs,
            max_num_batched_tokens=start.max_num_batched_tokens,
            block_size=start.block_size,
            num_blocks=num_blocks,
            vocab_size=model.vocab_size,
            enable_prefix_caching=start.enable_prefix_caching,
        ),
        ops,
        forward=lambda batch: decoder.forward(batch, kv_pool, expert_io),
    )
    _warm_up(engine)
    return Built(engine, model, ops)


def resolve_max_model_len(asked: int | None, trained: int) -> int:
    """What the user asked for, if the model can do it; otherwise what the model was trained for."""
    if asked is not None and asked > trained:
        raise ConfigError(f"--max-model-len {asked} is more than the model's max_position_embeddings ({trained})")
    return asked or trained


def _warm_up(engine: Engine) -> None:
    """Two tokens for nobody, so that the first client does not pay for first touches. Too short to enter the cache."""
    engine.add(RequestSpec(id="warm-up", prompt=[0], params=SamplingParams(max_tokens=2, temperature=0.0)))
    while engine.has_work:
        engine.step()
    engine.check()


class _Progress:
    """Says how far loading is, once every few seconds: nothing at all for models that load at once."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._said_s > _SAY_PROGRESS_EVERY_S:
            self._said_s = time.monotonic()
            log.info("loaded %d of %d %s", done, total, self._what)


def _size_pool(start: StartWorker, decoder: Decoder, max_model_len: int) -> int:
    shape = decoder.kv_shape(1, 1)
    bytes_per_token = torch.Size(shape).numel() * decoder.kv_dtype.itemsize
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    budget = start.kv_cache_bytes or int(available * start.memory_utilization)
    return num_kv_blocks(
        budget_bytes=budget,
        bytes_per_token=bytes_per_token,
        block_size=start.block_size,
        max_model_len=max_model_len,
        max_num_seqs=start.max_num_seqs,
    )
