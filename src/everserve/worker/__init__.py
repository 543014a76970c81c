"""The worker process: one model, or a share of one, behind a channel.

__main__.py   the process: bootstrap, then the loop
build.py      from a StartWorker message to an engine with its weights
loop.py       receive -> handle -> step -> send, forever
"""
