"""The processes of an instance: started, watched and ended together.

root.py                the first process: parent of all others, replaces the supervisor
root_end.py            ... as the supervisor sees it
shared_descriptors.py  a process that has the same descriptors as its parent
process_table.py       what the next supervisor must know
upgrading.py           another version goes on
supervisor.py          has the processes started, watches them, ends them together
next_supervisor.py     ... and the one after it
children.py            channels to what it has started, and how each ends
keepers.py             gateways, and the processes that keep them
steps.py               what it has to do, and may have to wait for
launching.py           how root starts each of them
early_zygote.py        the first zygote, started before everything else
bytecode.py            what they import is compiled once
provisioner.py         the workers of this machine: forked from a zygote, signalled, reaped
deferred_close.py      device descriptors, closed a moment after their process has ended
device_descriptors.py  which descriptors these are, and how a process sends copies of them
ballast.py             numbers that descriptors of a supervisor of GPUs do not get
mps.py                 the daemon through which several processes compute on one GPU at the same time
process.py             prctl, resource limits and /proc
logs.py                where the log lines of all processes go, and how they look
host.py                the memory and cores that the host and its cgroups leave us
signals.py             signals as bytes on a descriptor
service_manager.py     what systemd is told
listening.py           the socket that clients connect to
local_server.py        `everserve serve` as a child process, for demos, benchmarks and tests
"""
