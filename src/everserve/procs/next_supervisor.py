"""The supervisor after one that has died, or after an upgrade: it goes on as the process table says."""

import os
from collections.abc import Sequence

from everserve.procs import logs, process
from everserve.procs.device_descriptors import device_fds
from everserve.procs.keepers import GatewayMemory
from everserve.procs.process_table import Instance, TableFile, decode
from everserve.procs.root_end import RootEnd
from everserve.procs.state_directory import StateDirectory
from everserve.procs.supervisor import Supervisor, say_ready

_STDERR = 2


def go_on(root: RootEnd) -> int:
    """The supervisor after one that has died. Returns the instance's exit status."""
    found = TableFile(root.table_fd).read()
    assert found is not None, "there is an instance"
    instance = decode(found.instance, Instance)
    os.environ.clear()
    os.environ.update(instance.environment)
    logs.configure(logs.MAIN)
    state = StateDirectory.of_row(instance.state) if instance.state is not None else None
    named = found.descriptors() | ({state.lock} if state is not None else set())
    uses_device = instance.start_orchestrator.worker.compute.device == "cuda"
    devices = frozenset(device_fds() if uses_device else ()) - named
    root.close_others(named | devices)
    memory = GatewayMemory(found.listen, found.ledgers, found.shared)
    supervisor = Supervisor(instance, root, memory, lambda url: say_ready(instance.model, url))
    status = supervisor.run(found, devices)
    if state is not None:
        state.close()
    _let_end(instance.keeps)
    return status


def _let_end(pids: Sequence[int]) -> None:
    """These end when no process has our stderr any more. They have still to show what was written last."""
    if pids:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, _STDERR)
        os.close(nothing)
        process.wait_for_ends(pids, process.LAST_LINES_S)
