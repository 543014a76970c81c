"""The memory and cores that the host and its cgroups leave a process, from files as the kernel shows them."""

import os

import pytest

from everserve.procs.host import available_bytes, num_cores

GIB = 1 << 30
PAGE_CACHE_IS_FULL = """\
MemTotal:       16384000 kB
MemFree:           78000 kB
MemAvailable:   14680064 kB
Cached:         14500000 kB
"""


@pytest.fixture
def host(tmp_path):
    """A /proc of a host with 14 GiB to be had, and the directory where its cgroups are mounted."""

    class Host:
        proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"

        def is_in(self, cgroup: str, mounts: str = "") -> None:
            (self.proc / "self").mkdir(parents=True, exist_ok=True)
            (self.proc / "meminfo").write_text(PAGE_CACHE_IS_FULL)
            (self.proc / "self/cgroup").write_text(cgroup)
            (self.proc / "self/mountinfo").write_text(mounts or self.v2())

        def v2(self, root: str = "/") -> str:
            return f"23 1 0:5 / /proc rw - proc proc rw\n30 24 0:26 {root} {self.cgroups} rw shared:9 - cgroup2 cg rw\n"

        def v1(self, controller: str, root: str = "/") -> str:
            return f"35 31 0:32 {root} {self.cgroups / controller} rw,relatime - cgroup cgroup rw,{controller}\n"

        def write(self, directory: str, **files: object) -> None:
            (self.cgroups / directory).mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (self.cgroups / directory / name.replace("__", ".")).write_text(f"{content}\n")

    made = Host()
    made.is_in("0::/\n")
    num_cores.cache_clear()
    return made


def test_cached_files_are_no_obstacle(host):
    assert available_bytes(host.proc) == 14 * GIB


def test_the_smallest_limit_counts_and_the_kernel_takes_cached_files_back(host):
    host.is_in("0::/pods/one\n")
    host.write("pods/one", memory__max="max", memory__high="max", memory__current=9 * GIB, memory__stat="")
    assert available_bytes(host.proc) == 14 * GIB
    cached = f"anon {GIB}\nfile {5 * GIB}\nactive_file {GIB}\ninactive_file {3 * GIB}\nshmem {GIB}"
    host.write("pods/one", memory__max=8 * GIB, memory__current=7 * GIB, memory__stat=cached)
    assert available_bytes(host.proc) == 5 * GIB, "shared memory is not given back, files are"
    host.write("pods/one", memory__high=6 * GIB)
    assert available_bytes(host.proc) == 3 * GIB
    host.write("pods", memory__max=4 * GIB, memory__current=4 * GIB, memory__stat=f"inactive_file {GIB}")
    assert available_bytes(host.proc) == GIB, "of the cgroup above"
    host.write("pods", memory__current=6 * GIB)
    assert available_bytes(host.proc) == 0


def test_inside_a_container_its_own_cgroup_is_all_that_is_mounted(host):
    host.write(".", memory__max=2 * GIB, memory__current=GIB, memory__stat="inactive_file 0")
    for cgroup, root in (("/", "/"), ("/docker/abc", "/docker/abc"), ("/../other", "/"), ("/docker/abc", "/")):
        host.is_in(f"0::{cgroup}\n", host.v2(root))
        assert available_bytes(host.proc) == GIB, cgroup


def test_version_1(host):
    host.is_in("4:memory:/a/b\n1:cpu,cpuacct:/a\n0::/\n", host.v1("memory") + host.v1("cpu"))
    host.write("memory/a/b", **{"memory.limit_in_bytes": 3 * GIB, "memory.usage_in_bytes": 2 * GIB})
    host.write("memory/a/b", **{"memory.stat": f"cache {GIB}\ntotal_inactive_file {GIB}\ntotal_active_file 0"})
    host.write("memory/a", **{"memory.limit_in_bytes": 2**63 - 4096, "memory.usage_in_bytes": 2 * GIB})
    assert available_bytes(host.proc) == 2 * GIB
    host.write("cpu/a", **{"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000})
    assert num_cores(host.proc) == len(os.sched_getaffinity(0))
    num_cores.cache_clear()
    host.write("cpu/a", **{"cpu.cfs_quota_us": 50000})
    assert num_cores(host.proc) == 1


@pytest.mark.parametrize(("quota", "expected"), [("150000 100000", 1), ("20000 100000", 1), ("max 100000", None)])
def test_a_quota_of_cores(host, quota, expected):
    host.is_in("0::/pods/one\n")
    host.write("pods/one", cpu__max="max 100000")
    host.write("pods", cpu__max=quota)
    assert num_cores(host.proc) == expected or len(os.sched_getaffinity(0))
