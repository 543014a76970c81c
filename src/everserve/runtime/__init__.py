"""Process plumbing, under everything that is a process.

messages.py     every message between processes, one line each: who sends it to whom, when
memories.py     what pieces of shared memory are called
channel.py      framed messages over a socket: a blocking end and an asyncio end
events.py       typed events, one JSON line each
liveness/       cells and wardens: who rings, who pulses, who has died
cuda/           NVIDIA devices without torch: memory as descriptors, sharing a device
process.py      what a process asks of its kernel
signals.py      signals as bytes on a descriptor
listening.py    the socket that clients connect to
supervisor.py   starts the processes, watches them, ends them together
provisioner.py  the workers of this machine: forked from a zygote, signalled, mourned
local_server.py `everserve serve` as a child process, for demos, benchmarks and tests
"""
