"""The pool of KV blocks.

A block is in use (refs > 0) or free (refs == 0). A free block may still hold KV that a later prompt can reuse: it is
then *cached*, findable by the hash of all tokens up to its end, until it is taken for something else. Free blocks
wait in a list, next victim first: blocks that hold nothing useful at the head, cached ones by time of release.

A cached block may be *doubtful*: what it holds is where other processes keep it, and one of these has died, or others
have it now. It is checked before a prompt uses it (restoring.py).

              allocate                          share (prefix hit)
    free ------------------> in use        free ------------------> in use
         <------------------                    <------------------
          release (last ref)                     release (last ref)

The free list is linked through two arrays. Unlinking a block leaves its own two links as they were, so that linking it
back in reverse order (the undo log's order) restores the list exactly, wherever the block stood.
"""

from collections.abc import Callable, Iterable

from everserve.engine.undo import UndoLog

NO_BLOCKS_LEFT = -1


class BlockPool:
    """Reference counts, free list and prefix cache over `num_blocks` block numbers from `first_block` on (other numbers
    are other pools', where several share the memory)."""

    def __init__(self, num_blocks: int, block_size: int, undo: UndoLog, first_block: int = 0) -> None:
        assert num_blocks > 0 and block_size > 0 and first_block >= 0
        end = first_block + num_blocks
        self.num_blocks = num_blocks
        self.first_block = first_block
        self.block_size = block_size
        self.num_free = num_blocks
        self.refs = [0] * end  # by number, as the other tables
        self.hash_of: list[bytes | None] = [None] * end
        self.block_of: dict[bytes, int] = {}
        self.doubtful: set[int] = set()  # cached, and to be checked before they are used
        self.taken: set[int] = set()  # in the current step, to be written: what they held before is lost
        self._undo = undo
        self._head = end  # the list's sentinel: next[head] is the next victim, prev[head] the last
        self._next = [i + 1 for i in range(end)] + [first_block]
        self._prev = [i - 1 for i in range(end + 1)]
        self._prev[first_block] = end

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self) -> int:
        """Take the next victim; its old content is forgotten. NO_BLOCKS_LEFT if all are in use."""
        block = self._next[self._head]
        if block == self._head:
            return NO_BLOCKS_LEFT
        old_hash = self.hash_of[block]
        if old_hash is not None:
            self._forget(block, old_hash)
            self._undo.record(self._remember, block, old_hash)
        self._take(block)
        self.taken.add(block)
        return block

    def allocate_many(self, num: int) -> list[int]:
        """The next victims, all at once: `num` of them are free. A stream that comes back needs hundreds."""
        assert num <= self.num_free
        refs, hash_of, next_of = self.refs, self.hash_of, self._next  # a local name costs half as much
        blocks: list[int] = []
        block = next_of[self._head]
        for _ in range(num):
            old_hash = hash_of[block]
            if old_hash is not None:
                self._forget(block, old_hash)
                self._undo.record(self._remember, block, old_hash)
            refs[block] = 1
            blocks.append(block)
            block = next_of[block]
        if blocks:
            self._next[self._head], self._prev[block] = block, self._head
            self.num_free -= num
            self.taken.update(blocks)
            self._undo.record(self._leave_all, blocks)
        return blocks

    def share(self, block: int) -> None:
        """One more user of a block that is in use or cached."""
        if self.refs[block] == 0:
            self._take(block)
        else:
            self._add_ref(block)
            self._undo.record(self._drop_ref, block)

    def release(self, block: int) -> None:
        """One user fewer. The last one puts the block on the free list, cached content at the end."""
        assert self.refs[block] > 0, f"block {block} released more often than taken"
        self._drop_ref(block)
        self._undo.record(self._add_ref, block)
        if self.refs[block] == 0:
            before = self._head if self.hash_of[block] is not None else self._next[self._head]
            links = self._prev[block], self._next[block]  # if it was taken in this step, `_relink` will need them
            self._link(block, before)
            self._undo.record(self._unlink_again, block, *links)

    def publish(self, block: int, chain_hash: bytes) -> None:
        """The block is full and holds these tokens' KV: later prompts may find it."""
        if self.hash_of[block] is None and not self._is_known(chain_hash):
            self._remember(block, chain_hash)
            self._undo.record(self._forget, block, chain_hash)

    def publish_many(self, blocks: list[int], chain_hashes: list[bytes]) -> None:
        """`publish` for each of them."""
        published: list[tuple[int, bytes]] = []
        for block, chain_hash in zip(blocks, chain_hashes, strict=True):
            if self.hash_of[block] is None and not self._is_known(chain_hash):
                self._remember(block, chain_hash)
                published.append((block, chain_hash))
        self._undo.record(self._forget_all, published)

    def withdraw(self, block: int) -> None:
        """The block no longer holds what it was published for."""
        chain_hash = self.hash_of[block]
        if chain_hash is not None:
            self._forget(block, chain_hash)

    def _is_known(self, chain_hash: bytes) -> bool:
        """Whether a block is found by this hash already. One that is only perhaps right makes room."""
        block = self.block_of.get(chain_hash)
        if block is not None and block in self.doubtful:
            self.withdraw(block)
            return False
        return block is not None

    def withdraw_all(self, is_outdated: Callable[[bytes], bool]) -> None:
        """No block is found any more by such a hash."""
        for block in [block for chain_hash, block in self.block_of.items() if is_outdated(chain_hash)]:
            self.withdraw(block)

    def find(self, chain_hash: bytes) -> int | None:
        """The block that holds these tokens, if one does."""
        return self.block_of.get(chain_hash)

    def has(self, block: int) -> bool:
        """Whether this is a number of this pool."""
        return self.first_block <= block < self.first_block + self.num_blocks

    def is_forgotten(self, block: int) -> bool:
        """Free, not cached, and not taken in this step: this pool does not know what it holds."""
        return self.refs[block] == 0 and self.hash_of[block] is None and block not in self.taken

    def put_last(self, blocks: Iterable[int]) -> None:
        """Put free blocks at the end of the free list, in this order: they are taken last."""
        for block in blocks:
            assert self.refs[block] == 0, f"block {block} is in use"
            self._unlink(block)
            self._link(block, self._head)

    def free_list(self) -> list[int]:
        """The free blocks, next victim first."""
        blocks: list[int] = []
        block = self._next[self._head]
        while block != self._head and len(blocks) <= self.num_blocks:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _take(self, block: int) -> None:
        self._unlink(block)
        self._add_ref(block)
        self._undo.record(self._leave, block)

    def _leave(self, block: int) -> None:
        """The inverse of `_take`."""
        self._drop_ref(block)
        self._relink(block)

    def _leave_all(self, blocks: list[int]) -> None:
        """The inverse of `allocate_many`: their own links still say where they stood in the list."""
        for block in blocks:
            self.refs[block] = 0
        self._next[self._prev[blocks[0]]] = blocks[0]
        self._prev[self._next[blocks[-1]]] = blocks[-1]
        self.num_free += len(blocks)

    def _add_ref(self, block: int) -> None:
        self.refs[block] += 1

    def _drop_ref(self, block: int) -> None:
        self.refs[block] -= 1

    def _remember(self, block: int, chain_hash: bytes) -> None:
        self.hash_of[block] = chain_hash
        self.block_of[chain_hash] = block

    def _forget(self, block: int, chain_hash: bytes) -> None:
        self.hash_of[block] = None
        del self.block_of[chain_hash]
        self.doubtful.discard(block)

    def _forget_all(self, published: list[tuple[int, bytes]]) -> None:
        for block, chain_hash in published:
            self._forget(block, chain_hash)

    def _link(self, block: int, before: int) -> None:
        """Put the block into the free list in front of `before`."""
        after = self._prev[before]
        self._prev[block], self._next[block] = after, before
        self._next[after] = self._prev[before] = block
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._next[block], self._prev[block]
        self._next[after], self._prev[before] = before, after
        self.num_free -= 1

    def _unlink_again(self, block: int, prev: int, next: int) -> None:
        """The inverse of `_link`, with the links that the block had before."""
        self._unlink(block)
        self._prev[block], self._next[block] = prev, next

    def _relink(self, block: int) -> None:
        """The inverse of `_unlink`: the block's own links still say where it stood."""
        self._next[self._prev[block]] = self._prev[self._next[block]] = block
        self.num_free += 1
