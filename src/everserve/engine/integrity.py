"""What must hold between steps. Returns what does not, in words; empty = sound."""

from collections import Counter

from everserve.engine.blocks import BlockPool
from everserve.engine.journal import Journal
from everserve.engine.scheduler import Scheduler
from everserve.engine.sequence import Sequence, Status, is_of_masked
from everserve.plan.fairness import Places


def violations(scheduler: Scheduler, journal: Journal | None = None) -> list[str]:
    """Every way in which pool, tables, queues and log contradict each other."""
    found = [*_pool_violations(scheduler.pool), *_queue_violations(scheduler), *_ref_violations(scheduler)]
    found += _mask_violations(scheduler)
    if scheduler.parking is not None:
        sequences = [*scheduler.waiting, *scheduler.running]
        found += scheduler.parking.violations([sequence.id for sequence in sequences if sequence.saved is not None])
    if journal is not None:
        found += _index_violations(journal)
        for sequence in scheduler.waiting:
            if journal.num_committed(sequence):
                found.append(f"{sequence.id} waits, and the log has a record of it")
        for sequence in scheduler.running:
            found += _record_violations(journal, sequence)
    return found


def _pool_violations(pool: BlockPool) -> list[str]:
    """What is wrong in the pool: tens of thousands of blocks, whenever an engine falls idle: so whole lists are
    counted, not looked through.
    """
    found = []
    free, num_unused = pool.free_list(), pool.refs[pool.first_block :].count(0)
    num_distinct = len(set(free))
    if len(free) != pool.num_free or num_distinct != len(free):
        found.append(f"free list has {len(free)} entries ({num_distinct} distinct), num_free says {pool.num_free}")
    if any(map(pool.refs.__getitem__, free)):
        found.append(f"blocks on the free list are in use: {[block for block in free if pool.refs[block] != 0]}")
    if num_unused != pool.num_free:
        found.append("some unused blocks are not on the free list")
    num_hashed = len(pool.hash_of) - pool.hash_of.count(None)
    is_found = all(pool.hash_of[block] == chain_hash for chain_hash, block in pool.block_of.items())
    if num_hashed != len(pool.block_of) or not is_found:
        found.append("the prefix cache's two maps differ")
    if any(pool.refs[block] or pool.hash_of[block] is None for block in pool.doubtful):
        found.append("blocks are in use, or not cached, that should be checked before that")
    return found


def _queue_violations(scheduler: Scheduler) -> list[str]:
    found = []
    sequences = [*scheduler.waiting, *scheduler.running]
    if len({sequence.id for sequence in sequences}) != len(sequences):
        found.append("a sequence is queued twice")
    num_running = Counter(sequence.flow for sequence in scheduler.running)
    if scheduler.places != Places.of(num_running):
        found.append(f"places are counted wrongly: {num_running} have some")
    for sequence in scheduler.waiting:
        if sequence.status is not Status.WAITING or sequence.blocks or sequence.num_computed:
            found.append(f"{sequence.id} waits but is {sequence.status.name} with {len(sequence.blocks)} blocks")
    for sequence in scheduler.running:
        capacity = len(sequence.blocks) * scheduler.pool.block_size
        num_passed = sequence.num_passed_at(sequence.num_computed, scheduler.visible_keys)
        if sequence.num_passed > num_passed and sequence.saved is None:
            found.append(f"{sequence.id}: {sequence.num_passed} blocks are given back, and rows see some of them")
        if sequence.status is not Status.RUNNING:
            found.append(f"{sequence.id} runs but is {sequence.status.name}")
        if not sequence.num_computed <= capacity or sequence.num_pending < 1:
            found.append(
                f"{sequence.id}: {sequence.num_computed} of {len(sequence.tokens)} tokens computed, room for {capacity}"
            )
    return found


def _ref_violations(scheduler: Scheduler) -> list[str]:
    held = Counter(block for sequence in scheduler.running for block in sequence.held_blocks)
    refs = scheduler.pool.refs
    if len(refs) - refs.count(0) == len(held) and all(refs[block] == count for block, count in held.items()):
        return []
    counts = {block: count for block, count in enumerate(refs) if count}
    return [f"reference counts {counts} differ from the block tables {dict(held)}"]


def _mask_violations(scheduler: Scheduler) -> list[str]:
    """KV that is not exact is known as such, and there is none if no experts are masked."""
    found = []
    for sequence in scheduler.running:
        masked, num_computed = sequence.masked, sequence.num_computed
        if not scheduler.mask_id and masked is not None:
            found.append(f"{sequence.id}: {num_computed} tokens, not exact from {masked.position} on, and no mask")
        if scheduler.mask_id and sequence.saved is None and (masked is None or masked.position > num_computed):
            found.append(f"{sequence.id} would be computed under mask {scheduler.mask_id} without a note")
    if not scheduler.mask_id and any(map(is_of_masked, scheduler.pool.block_of)):
        found.append("the prefix cache has blocks that are not exact, and no mask")
    return found


def _index_violations(journal: Journal) -> list[str]:
    """Each place for a record has one owner, and the log has records where we think."""
    used = [entry.index for entry in journal.entries.values() if entry.index is not None]
    used += [*journal.ended, *(record.index for record in journal.adopted.values())]
    if sorted([*used, *journal.free]) != list(range(journal.log.shape.num_records)):
        return [f"places in the log: {sorted(used)} are used and {sorted(journal.free)} are free"]
    there = sorted(record.index for record in journal.log.records())
    return [] if there == sorted(used) else [f"the log has records in places {there}, not in {sorted(used)}"]


def _record_violations(journal: Journal, sequence: Sequence) -> list[str]:
    """A record says what we think, and no more than what is true: every token that it counts is in the log."""
    num_committed = journal.num_committed(sequence)
    if num_committed > sequence.num_computed:
        return [f"{sequence.id}: {num_committed} tokens committed, {sequence.num_computed} computed"]
    if num_committed == 0:
        return []
    record = journal.log.find(journal.entries[sequence.id].key)
    expected = num_committed, tuple(sequence.blocks[: sequence.num_blocks_for(num_committed)])
    if record is None or (record.num_tokens, record.blocks) != expected:
        return [f"{sequence.id}: the record should say {expected}, and is {record}"]
    if journal.writer.is_elsewhere:  # that is known when a stream is restored from it
        return []
    num_intact = journal.count_intact(sequence, num_committed)
    return [] if num_intact == num_committed else [f"{sequence.id}: {num_intact} of {num_committed} tokens in the log"]
