"""The processes of an instance: started, watched and ended together.

supervisor.py          starts the processes, watches them, ends them together
launching.py           how each of them is started
early_zygote.py        the first zygote, started before everything else
bytecode.py            what they import is compiled once
provisioner.py         the workers of this machine: forked from a zygote, signalled, reaped
deferred_close.py      device descriptors, closed a moment after their process has ended
device_descriptors.py  which descriptors these are, and how a process sends copies of them
ballast.py             numbers that descriptors of a supervisor of GPUs do not get
mps.py                 the daemon through which several processes compute on one GPU at the same time
process.py             prctl, resource limits and /proc
signals.py             signals as bytes on a descriptor
listening.py           the socket that clients connect to
local_server.py        `everserve serve` as a child process, for demos, benchmarks and tests
"""
