"""How one worker advances: schedule -> run -> postprocess, one step at a time, in one thread.

engine.py      the step itself, and the doors: add, cancel, step, check
scheduler.py   who runs in this step, with how many tokens; preemption
sequence.py    one stream inside the engine: tokens, computed length, blocks
blocks.py      the pool of KV blocks: reference counts, prefix cache, exact least-recently-used order
undo.py        the per-step undo log: a step that is abandoned leaves no trace
batching.py    scheduled chunks to a StepBatch
integrity.py   what must hold between steps; runs whenever the engine is idle
"""
