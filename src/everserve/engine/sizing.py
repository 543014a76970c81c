"""How large a worker's KV pool is, and its log. The orchestrator, which allocates logs, and the worker, which uses one,
come to the same sizes by this; hence no torch."""

from dataclasses import dataclass, replace

from everserve.config.engine import EngineConfig
from everserve.errors import ConfigError
from everserve.kvlog.layout import LogShape
from everserve.memory.kv_pieces import KvShape
from everserve.memory.pieces.parity_layout import ParityShape
from everserve.model.config import ModelConfig
from everserve.plan.sizing import num_kv_blocks
from everserve.tables.calls import ShardKind
from everserve.tables.goal import Capacity

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KvSizes:
    """The sizes of one attention worker's KV."""

    max_model_len: int
    log: LogShape

    @property
    def num_blocks(self) -> int:
        return self.log.num_blocks

    def pieces(self, model: ModelConfig, capacity: Capacity) -> KvShape:
        """The KV pool of a worker that has some heads, for the streams of all homes: one on each device. Every home has
        `num_blocks` blocks, so all workers together need as much as homes with all heads would."""
        assert capacity.devices is not None, "divided heads have devices"
        slots = zip(model.calls, capacity.slots(len(model.calls)), strict=True)
        num_pieces = sum(num for call, num in slots if call.kind is ShardKind.HEAD)
        piece_bytes = 2 * self.log.block_size * self.log.piece_bytes
        return KvShape(capacity.devices * self.num_blocks, num_pieces, piece_bytes, self.log.block_size)

    def mirror(self) -> KvShape:
        """All heads of one home's streams, in host memory: where heads are divided over GPUs."""
        log = self.log
        num_heads = log.num_layers * log.num_planes // 2
        return KvShape(log.num_blocks, num_heads, 2 * log.block_size * log.piece_bytes, log.block_size)

    def parity(self, model: ModelConfig, capacity: Capacity) -> ParityShape:
        """What such a worker keeps of other workers' pools."""
        assert capacity.devices is not None, "divided heads have devices"
        return ParityShape(self.pieces(model, capacity), capacity.devices, max_members=max(capacity.devices - 1, 1))

    def records(self, num_devices: int) -> LogShape:
        """The log of a home whose streams' KV is kept by other workers: block numbers are those of all homes, and
        those that only mirrors have; and streams that wait may have records too."""
        return replace(
            self.log, num_blocks=2 * num_devices * self.num_blocks, num_records=self.log.num_records * 3 // 2
        )

    @classmethod
    def of(cls, model: ModelConfig, engine: EngineConfig, dtype: str) -> "KvSizes":
        """Raises ConfigError if the longest stream would not fit."""
        max_model_len = resolve_max_model_len(engine.max_model_len, model.max_position_embeddings)
        kv = model.kv
        piece_bytes = kv.row_size * _ITEM_BYTES[model.dtype if dtype == "auto" else dtype]
        num_planes = kv.num_planes * kv.num_heads
        num_blocks = num_kv_blocks(
            budget_bytes=engine.kv_cache_bytes,
            bytes_per_token=model.num_layers * num_planes * piece_bytes,
            block_size=engine.block_size,
            max_model_len=max_model_len,
            max_num_seqs=engine.max_num_seqs,
        )
        shape = LogShape(
            num_blocks=num_blocks,
            block_size=engine.block_size,
            num_layers=model.num_layers,
            num_planes=num_planes,
            piece_bytes=piece_bytes,
            num_records=2 * engine.max_num_seqs,  # those of a predecessor may have to stay for a while
            max_blocks=-(-max_model_len // engine.block_size),
        )
        return cls(max_model_len, shape)


def resolve_max_model_len(asked: int | None, trained: int) -> int:
    """What the user asked for, if the model can do it; otherwise what the model was trained for."""
    if asked is not None and asked > trained:
        raise ConfigError(f"--max-model-len {asked} is more than the model's max_position_embeddings ({trained})")
    return asked or trained
