"""One stream inside the engine.

    tokens          p p p p p p p p | o o o        prompt, then output
    num_computed    ^^^^^^^^^^^^                   KV of these is in the pool
    num_pending                 ^^^^^^^^           the rest: 1 = decoding, more = prefilling

A step computes some of the pending tokens. When none is left pending, the last row's logits give the next token. A
preempted stream loses its blocks, not its tokens: everything becomes pending again and is recomputed as given.

A *resumed* stream began on a worker that is gone. Its first outputs are *known*: they stand in `tokens` from the start,
count as output everywhere (token index, penalties, limits), and are computed like a prompt. Or not computed at all:
what is `saved` of its KV in a log is brought back when it is admitted (restoring.py).

While experts are *masked* a stream's KV is not exact from some position on, and `masked` says which. When the mask is
lifted everything from there on becomes pending again: the stream goes on as an exact one would, given its tokens.

Where all layers have windows, blocks in front of what the next row sees have *passed*: they are given back, and their
numbers stay in the table, where nothing reads what they stand for.

    WAITING --admit--> RUNNING --finish--> FINISHED
       ^------preempt-----'
    (cancel: from anywhere, the sequence is simply forgotten)
"""

import hashlib
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everserve.engine.foresight import Foresight
from everserve.engine.saved import Saved
from everserve.guides.guide import Guide
from everserve.kvlog.chains import marked_chains, start_of
from everserve.model.forbidden import BadWords
from everserve.model.penalties import Penalties
from everserve.model.sampling import SamplingRow, is_plain, needs_logits
from everserve.tables.outputs import TokenLogprobs
from everserve.tables.requests import Masked, RequestSpec, SamplingParams

_HASH_BYTES = 16
_MASKED = b"m"  # behind a hash of KV that is not exact


def is_of_masked(block_hash: bytes) -> bool:
    """Whether this is a hash of KV that was computed under a mask."""
    return len(block_hash) > _HASH_BYTES


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """The engine's state of one stream. Only the scheduler, and the restorer for it, change `status`, `blocks`,
    `num_computed`, `num_published`, `saved` and `masked`."""

    def __init__(
        self,
        spec: RequestSpec,
        block_size: int,
        added_s: float,
        saved: Saved | None = None,
        guide: Guide | None = None,
    ) -> None:
        self.spec = spec
        self.id = spec.id
        self.flow = spec.flow
        self.params: SamplingParams = spec.params
        self.is_plain = is_plain(spec.params)
        self.is_pooled = spec.params.pooled
        self.needs_logits = needs_logits(spec.params)
        self.added_s = added_s
        self.queued_s = -1.0  # how long it waited before its first step; negative while it waits
        self.tokens = spec.prompt + spec.known
        self.num_prompt = len(spec.prompt)
        self.num_most = self.num_prompt + spec.params.max_tokens  # tokens, if it does not end before
        # How many tokens another worker has certainly computed before. The last known one was sampled there; its KV
        # may or may not have been computed.
        self.num_resumed = len(self.tokens) - 1 if spec.known else 0
        self.num_given = max(self.num_prompt, self.num_resumed)  # what comes after these is new, and decoded
        self.num_computed = 0
        self.num_cached = 0  # prompt tokens found in the prefix cache at first admission
        self.saved = saved  # KV to be brought back; None once that was tried
        self.num_restored = 0  # tokens brought back since admission
        self.restoring_s = 0.0
        self.last_step = 0  # the number of the last step in which it advanced or was admitted
        self.masked: Masked | None = None  # what is computed from there on is not exact; None: all of it is
        self.blocks: list[int] = []
        self.num_passed = 0  # leading ones of these that are given back: no row sees them any more
        self.num_published = 0  # leading blocks that other streams may find; later full ones will follow
        self.status = Status.WAITING
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.pooled: bytes | None = None  # what its prompt says, if that is wanted and known
        self.penalties = Penalties.of(spec)
        self.bad_words = BadWords(spec.params.bad_words) if spec.params.bad_words else None
        self.guide = guide  # of its grammar, if it has one
        self.foresight = Foresight()
        self.chain_start = start_of(spec.cache_salt)
        self._block_size = block_size
        self._hashes: list[bytes] = []  # of exact KV
        self._masked_hashes: list[bytes] = []  # from the block on in which `_hashed_for` begins
        self._hashed_for: Masked | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of prompt rows are still needed: those rows must be computed, not found in the cache.

        They travel with the first output; so the client of a resumed stream has them.
        """
        is_wanted = self.params.prompt_logprobs is not None and not self.spec.known
        return is_wanted and len(self.prompt_logprobs) < self.num_prompt

    @property
    def held_blocks(self) -> list[int]:
        return self.blocks[self.num_passed :] if self.num_passed else self.blocks

    def num_passed_at(self, num_tokens: int, visible_keys: int | None) -> int:
        """How many blocks lie in front of what the row behind so many tokens sees, and all after it."""
        if visible_keys is None or num_tokens < visible_keys:
            return 0
        return (num_tokens - visible_keys + 1) // self._block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def chains(self, num_tokens: int) -> NDArray[np.uint64]:
        """The chain after each of its first tokens, by which a log certifies their KV."""
        return marked_chains(self.tokens[:num_tokens], self.masked, self.chain_start)

    def block_hashes(self, num_blocks: int | None = None) -> list[bytes]:
        """One hash per full block of tokens, each over everything before it too, and over the mask under which it is
        computed. At least of the first `num_blocks`; None: of all."""
        exact, masked = self.exact_hashes(num_blocks), self.masked
        if masked is None:
            return exact
        first, block_size = masked.position // self._block_size, self._block_size
        if masked != self._hashed_for:
            self._masked_hashes, self._hashed_for = [], masked
        hashes = exact[:first] + self._masked_hashes
        for start in range(len(hashes) * block_size, len(exact) * block_size, block_size):
            marked = (hashes[-1] if hashes else self.spec.cache_salt) + self.tokens[
                start : start + block_size
            ].tobytes()
            marked += masked.mask_id.to_bytes(8, "little") + max(masked.position - start, 0).to_bytes(4, "little")
            hashes.append(hashlib.blake2b(marked, digest_size=_HASH_BYTES).digest() + _MASKED)
        self._masked_hashes = hashes[first:]
        return hashes

    def exact_hashes(self, num_blocks: int | None = None) -> list[bytes]:
        """The same for KV that is computed without a mask."""
        num_hashed, block_size = len(self._hashes), self._block_size
        num_wanted = len(self.tokens) // block_size if num_blocks is None else num_blocks
        assert num_wanted * block_size <= len(self.tokens)
        if num_hashed < num_wanted:
            parent = self._hashes[-1] if self._hashes else self.spec.cache_salt
            for start in range(num_hashed * block_size, num_wanted * block_size, block_size):
                tokens = self.tokens[start : start + block_size].tobytes()
                parent = hashlib.blake2b(parent + tokens, digest_size=_HASH_BYTES).digest()
                self._hashes.append(parent)
        return self._hashes

    def forget_prompt_scores(self) -> None:
        """Prompt rows from `num_computed` on are computed again. Once the first output is made its scores are final."""
        if self.num_output == 0:
            del self.prompt_logprobs[self.num_computed + 1 :]

    def note_start(self, now_s: float) -> None:
        """A step that began at this time has computed tokens of this sequence."""
        if self.queued_s < 0:
            self.queued_s = now_s - self.added_s

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.penalties is not None:
            self.penalties.count(token)

    def sampling_row(self) -> SamplingRow:
        """What the next token is chosen from."""
        return SamplingRow(
            self.params,
            self.num_output,
            self.penalties,
            self.guide.mask() if self.guide is not None else None,
            self.bad_words.last_tokens(self.tokens, self.num_prompt) if self.bad_words is not None else (),
        )


class Chunk(NamedTuple):
    """The next `num_tokens` pending tokens of a sequence.

    Or the one that is pending and its *drafts*: tokens that may come next (speculation.py). Every row of it has logits.
    """

    sequence: Sequence
    num_tokens: int  # with the drafts
    completes: bool  # nothing is pending afterwards, so the last row's logits give the next token
    drafts: tuple[int, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """How many of them belong to the prompt."""
        return max(0, min(self.num_tokens, self.sequence.num_prompt - self.sequence.num_computed))

    @property
    def num_known_tokens(self) -> int:
        """How many of them a worker that is gone has computed before."""
        return max(0, min(self.num_tokens, self.sequence.num_resumed - self.sequence.num_computed))
