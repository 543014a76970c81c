"""How one worker advances: schedule -> run -> postprocess, one step at a time, in one thread.

engine.py      the step itself, and the public methods: add, cancel, step, log_step, check
scheduler.py   which streams run in this step, with how many tokens; preemption
sequence.py    one stream inside the engine: tokens, computed length, blocks; a chunk of it
blocks.py      the pool of KV blocks: reference counts, prefix cache, exact least-recently-used order
undo.py        the per-step undo log: a step that is abandoned leaves no trace
batching.py    scheduled chunks to the rows of a step, and these to a StepBatch
journal.py     what of each stream is in this engine's KV log, and the records that say so
saved.py       one stream's KV in a log, for the worker that continues the stream
restoring.py   bringing it back, when the stream is admitted
forward.py     what a step is computed with: rows in, logits or tokens out
ahead.py       a step that is launched before the one in front of it has ended
step_times.py  how long steps take, and how much work was in them
warm_up.py     its first steps
integrity.py   what must hold between steps; runs whenever the engine is idle
limits.py      what model, KV cache and device allow, besides the config (config/engine.py)
sizing.py      how large the KV pool and its log are; without torch, because the orchestrator allocates the log
"""
