"""Process plumbing, under everything that is a process.

messages.py    every message between processes, one line each: who sends it to whom, when
channel.py     framed messages over a socket: a blocking end and an asyncio end
events.py      typed events, one JSON line each
local_server.py  `everserve serve` as a child process, for demos, benchmarks and tests
supervisor.py  starts the processes, watches them, ends them together
"""
