"""Every token stream between its client and its worker.

fleet.py           all workers and all streams: which worker gets which stream, and what happens when it is lost
links.py           the channel to one incarnation of one worker; fencing
stream.py          exactly once: streams by token index, and those that run at one worker
waiting.py         streams without a worker, in order
poison.py          streams that may be what kills their workers
log_references.py  KV logs that streams still need
choices.py         one choice: tokens in, text out
journal.py         what an answer is made of, written down in the ledger first
plain.py           streams whose events are written in C
outbox.py          from the callbacks that make events to the task that writes them
resumable.py       streams of clients that may lose their connections and come back
metrics.py         what is counted and measured
cadence.py         tokens and the times between them, in ticks
tracing.py         one trace per request: the calls that it receives
"""
