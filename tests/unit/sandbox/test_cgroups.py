"""Control groups: found by looking, bounds written and read as the kernel has them, nothing left by the dead."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends import cgroups, roots
from turnlog.sandbox_workers.backends.cgroups import (
    BASELINE_BYTES,
    BASELINE_PIDS,
    KILL,
    LEAF,
    CgroupFolders,
    Cgroups,
    ControlGroup,
    find,
    hand_down,
    sweep,
)
from turnlog.sandbox_workers.protocol import BackendUnavailable
from turnlog.schemas.events import SandboxLimits

LIMITS = SandboxLimits(memory_bytes=64 << 20, disk_bytes=8 << 20, pids=16)
HOARD = "input(); hoard = bytearray(300 << 20)"
"""More than the limit, little enough to be harmless where nothing stops it."""
FORKS = """
import os, time
input()
for _ in range(40):
    if not (os.fork()):
        time.sleep(30)
        os._exit(0)
"""
"""Forty children at most."""
V2_MOUNT = "24 1 0:22 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
"""


@pytest.fixture
def made() -> Cgroups:
    """The machine's own."""
    found = Cgroups.open(SandboxSettings())
    if found is None:
        pytest.skip("cgroups cannot be written")
    return found


@pytest.fixture
def group(made: Cgroups) -> Iterator[ControlGroup]:
    """A group on this machine's kernel."""
    group = made.group()
    yield group
    group.close()
    assert not [place for parent in made.tree.places() for place in parent.glob(f"{roots.owned_prefix()}*")]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder that stands for / of a version 2 machine: plain files, so that what we write and read can be seen."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user.slice/app\n")
    (tmp_path / "proc/self/mountinfo").write_text(V2_MOUNT)
    own = tmp_path / "sys/fs/cgroup/user.slice/app"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu io memory pids\n")
    (own / "cgroup.subtree_control").write_text("")
    (own / "cgroup.procs").write_text("")
    return tmp_path


def found_on(machine: Path) -> CgroupFolders | None:
    """What is found on a machine in a folder."""
    return find(machine / "proc", machine)


def started(code: str) -> subprocess.Popen[bytes]:
    """Python that waits for a line before it does anything."""
    return subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE)


def test_the_kernel_ends_a_process_above_the_memory_limit_and_says_so(group: ControlGroup) -> None:
    with started(HOARD) as process:
        group.adopt(process.pid)
        group.begin(LIMITS)
        assert group.exceeded_limit() is None
        process.communicate(b"\n")
    assert process.returncode == -9
    assert group.exceeded_limit() == "memory_bytes"
    group.begin(LIMITS)
    assert group.exceeded_limit() is None, "a new call begins at the counters that it finds"


def test_the_kernel_refuses_processes_above_the_limit_and_says_so(group: ControlGroup) -> None:
    with started(FORKS) as process:
        group.adopt(process.pid)
        group.begin(LIMITS)
        process.communicate(b"\n")
        assert process.returncode == 1
        assert group.exceeded_limit() == "pids"
        alive = [pid for pid in map(int, (group.places[0] / "cgroup.procs").read_text().split()) if pid]
        assert len(alive) == LIMITS.pids + 1
        group.close()
    assert not [pid for pid in alive if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_a_whole_tree_is_adopted_and_what_it_starts_later_follows(group: ControlGroup) -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '30']); print(p.pid, flush=True); input(); p.kill()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        group.adopt(process.pid)
        group.adopt(process.pid)
        for place in group.places:
            assert {process.pid, child} <= set(map(int, (place / "cgroup.procs").read_text().split()))
        process.communicate(b"\n")


def test_a_tree_is_adopted_whose_children_end_meanwhile(group: ControlGroup) -> None:
    busy = """
        import os, signal, time
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        os.fork() or (time.sleep(0.003), os._exit(0))
        print("forking", flush=True)
        while True:
            os.fork() or (time.sleep(0.003), os._exit(0))
            time.sleep(0.0005)
    """
    command = [sys.executable, "-c", textwrap.dedent(busy)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            group.adopt(process.pid)
            for place in group.places:
                assert str(process.pid) in (place / "cgroup.procs").read_text().split()
        finally:
            process.kill()


def test_cpu_time_is_counted_of_children_that_nobody_waits_for(group: ControlGroup) -> None:
    burn = """
        import os, signal, time
        input()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for _ in range(5):
            if not os.fork():
                while time.process_time() < 0.1:
                    pass
                os._exit(0)
            try:
                os.wait()
            except ChildProcessError:
                pass
    """
    with started(textwrap.dedent(burn)) as process:
        group.adopt(process.pid)
        group.begin(LIMITS)
        assert group.cpu_s() < 0.4
        process.communicate(b"\n")
    assert group.cpu_s() > 0.4
    group.begin(LIMITS)
    assert group.cpu_s() < 0.4


def test_cores_are_bounded(made: Cgroups) -> None:
    half = Cgroups(made.tree, 0.5).group()
    burn = "import time; input(); end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    try:
        with started(burn) as process:
            half.adopt(process.pid)
            began = time.monotonic()
            process.communicate(b"\n")
            wall = time.monotonic() - began
    finally:
        half.close()
    assert wall > 0.45, "0.3 s of CPU at half a core take 0.6 s"


def test_a_call_with_the_same_limits_writes_nothing(machine: Path) -> None:
    tree = found_on(machine)
    assert tree is not None
    group = ControlGroup(tree, "turnlog-sandbox-0-0-0-0", 1.5)
    group.begin(LIMITS)
    written = list((tree.folders["memory"] / "turnlog-sandbox-0-0-0-0").iterdir())
    assert {"memory.max", "memory.swap.max", "pids.max"} <= {path.name for path in written}
    for path in written:
        path.write_text("as it was")
    group.begin(LIMITS)
    assert {path.read_text() for path in written} == {"as it was"}


def test_limits_go_up_and_down(group: ControlGroup) -> None:
    more = SandboxLimits(memory_bytes=256 << 20, disk_bytes=8 << 20, pids=32)
    for limits in (LIMITS, more, LIMITS):
        group.begin(limits)
        name = "memory.limit_in_bytes" if group.version == 1 else "memory.max"
        bound = int((group.folders["memory"] / name).read_text())
        assert abs(bound - limits.memory_bytes - limits.disk_bytes - BASELINE_BYTES) < 4096
        assert int((group.folders["pids"] / "pids.max").read_text()) == limits.pids + 1, "nobody stands in it yet"


def test_a_lower_limit_than_what_is_in_use_ends_nobody_by_itself(group: ControlGroup) -> None:
    """On version 1 the old bound then holds; version 2 ends whom it must, which is the limit's meaning."""
    if group.version == 2:
        return
    more = SandboxLimits(memory_bytes=256 << 20, disk_bytes=8 << 20, pids=16)
    code = "input(); hoard = bytearray(200 << 20); print('up', flush=True); input()"
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        group.adopt(process.pid)
        group.begin(more)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"up\n"
        group.begin(LIMITS)
        assert process.poll() is None
        assert int((group.folders["memory"] / "memory.limit_in_bytes").read_text()) > 256 << 20
        process.communicate(b"\n")
    assert group.exceeded_limit() is None
    group.begin(LIMITS)
    assert int((group.folders["memory"] / "memory.limit_in_bytes").read_text()) < 256 << 20


def test_version_2_is_found_with_its_controllers(machine: Path) -> None:
    own = machine / "sys/fs/cgroup/user.slice/app"
    assert found_on(machine) == CgroupFolders(2, {KILL: own, "memory": own, "pids": own, "cpu": own})
    (own / "cgroup.controllers").write_text("hugetlb\n")
    assert found_on(machine) is None


def test_version_1_is_found_below_our_own_memory_group(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("9:pids:/\n4:memory:/docker/abc/job\n2:cpu,cpuacct:/elsewhere\n0::/\n")
    (machine / "proc/self/mountinfo").write_text(V1_MOUNTS)
    top = machine / "sys/fs/cgroup"
    for folder in ("cpu,cpuacct", "memory/job", "pids"):
        (top / folder).mkdir(parents=True)
        (top / folder / "cgroup.procs").touch()
    processors = top / "cpu,cpuacct"
    assert found_on(machine) == CgroupFolders(
        1, {"memory": top / "memory/job", "pids": top / "pids", "cpu": processors, "cpuacct": processors}
    )


def test_a_machine_without_control_groups_has_none(tmp_path: Path) -> None:
    assert found_on(tmp_path) is None
    with pytest.raises(BackendUnavailable, match=r'cgroups = "required".*as root'):
        Cgroups.open(SandboxSettings(cgroups="required"), tree=CgroupFolders(1, {}))
    assert Cgroups.open(SandboxSettings(cgroups="off")) is None
    with pytest.raises(BackendUnavailable, match="must be one of auto, required, off"):
        Cgroups.open(SandboxSettings(cgroups="maybe"))


def test_what_is_written_to_and_read_from_version_2(machine: Path) -> None:
    tree = found_on(machine)
    assert tree is not None
    group = ControlGroup(tree, "turnlog-sandbox-0-0-0-0", 1.5)
    place = machine / "sys/fs/cgroup/user.slice/app/turnlog-sandbox-0-0-0-0"
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as alone:  # our own process has servers below it
        group.adopt(alone.pid)
        group.begin(LIMITS)
        alone.communicate()
    written = {path.name: path.read_text() for path in place.iterdir()}
    assert written == {
        "cgroup.procs": str(alone.pid),
        "cpu.max": "150000 100000",
        "memory.max": str((64 << 20) + (8 << 20) + BASELINE_BYTES),
        "memory.swap.max": "0",
        "pids.max": str(16 + 1 + BASELINE_PIDS),
    }
    (place / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\n")
    assert group.cpu_s() == 2.5
    (place / "pids.events").write_text("max 3\n")
    assert group.exceeded_limit() == "pids"
    (place / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\noom_group_kill 0\n")
    assert group.exceeded_limit() == "memory_bytes"
    (place / "memory.stat").write_text(f"anon 4096\nshmem {9 << 20}\n")
    assert group.exceeded_limit() == "disk_bytes", "the pages that filled it were those of its tmpfs"
    group.begin(LIMITS)
    assert group.exceeded_limit() is None
    assert group.cpu_s() == 0.0


def test_closing_a_version_2_group_kills_it_with_one_write_and_removes_it(machine: Path) -> None:
    tree = found_on(machine)
    assert tree is not None
    group = ControlGroup(tree, "turnlog-sandbox-0-0-0-1", 0)
    place = machine / "sys/fs/cgroup/user.slice/app/turnlog-sandbox-0-0-0-1"
    (place / "cgroup.procs").write_text("1\n")
    (place / "cgroup.kill").touch()

    def kernel() -> None:
        while (place / "cgroup.kill").read_text() != "1":
            time.sleep(0.001)
        for path in place.iterdir():
            path.unlink()

    acting = threading.Thread(target=kernel)
    acting.start()
    group.close()
    acting.join()
    sweep(tree)
    assert not place.exists()


def test_no_processes_in_a_group_that_hands_down_so_the_worker_moves_to_a_leaf() -> None:
    unified = find_real_version_2()
    base = unified / f"turnlog-test-{os.getpid()}"
    code = f"""
        import os, pathlib
        from turnlog.sandbox_workers.backends.cgroups import hand_down, put
        base = pathlib.Path({str(base)!r})
        put(base / "cgroup.procs", str(os.getpid()))
        hand_down(base, ("hugetlb",))
        hand_down(base, ("hugetlb",))
        (base / "inner").mkdir()
        own = [line for line in open("/proc/self/cgroup") if line.startswith("0::")][0]
        print((base / "inner/cgroup.controllers").read_text().strip(), own.strip().rpartition("/")[2])
        (base / "inner").rmdir()
    """
    before = (unified / "cgroup.subtree_control").read_text()
    base.mkdir()
    try:
        hand_down(unified, ("hugetlb",))
        said = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
        )
        assert (said.stdout, said.stderr) == (f"hugetlb {LEAF}\n", "")
    finally:
        for folder in (base / "inner", base / LEAF, base):
            if folder.is_dir():
                folder.rmdir()
        if "hugetlb" not in before:
            cgroups.put(unified / "cgroup.subtree_control", "-hugetlb")


def test_one_write_kills_a_real_version_2_group_with_everything_in_it() -> None:
    unified = find_real_version_2()
    group = ControlGroup(CgroupFolders(2, {KILL: unified}), f"{roots.owned_prefix()}kill", 0)
    with started("import os, time; [os.fork() for _ in range(3)]; print(input()); time.sleep(30)") as process:
        group.adopt(process.pid)
        group.close()
        assert process.wait(5) == -9
    sweep()
    assert not list(unified.glob(f"{roots.owned_prefix()}kill"))


def find_real_version_2() -> Path:
    """Where this machine's kernel shows version 2 to us."""
    tree = find()
    place = tree.folders.get(KILL) if tree else None
    if place is None or "hugetlb" not in (place / "cgroup.controllers").read_text():
        pytest.skip("no writable cgroup2 mount with a controller to spare")
    return place


def test_what_a_killed_worker_leaves_is_gone_after_a_sweep(made: Cgroups, tmp_path: Path) -> None:
    """The worker is killed with a process in its group that would outlive it, and a workspace on disk."""
    code = """
        import subprocess, sys, tempfile
        from turnlog.sandbox_settings import SandboxSettings
        from turnlog.sandbox_workers.backends.cgroups import Cgroups
        from turnlog.sandbox_workers.backends.roots import owned_prefix
        group = Cgroups.open(SandboxSettings()).group()
        folder = tempfile.mkdtemp(prefix=owned_prefix())
        open(folder + "/file", "w").close()
        child = subprocess.Popen(["sleep", "60"])
        group.adopt(child.pid)
        print(folder, child.pid, flush=True)
        input()
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    folder, child = worker.stdout.readline().split()
    orphan = psutil.Process(int(child))
    mark = f"-{worker.pid}-"

    def groups() -> list[Path]:
        return [path for parent in made.tree.places() for path in parent.glob(f"turnlog-sandbox-*{mark}*")]

    assert groups()
    sweep()
    assert groups(), "its owner lives"
    assert Path(folder).is_dir()
    worker.kill()
    worker.wait()
    worker.stdin.close()
    worker.stdout.close()
    deadline = time.monotonic() + 20
    while (groups() or Path(folder).exists()) and time.monotonic() < deadline:
        sweep()  # twice when what was killed is still dying; other workers of this machine may sweep, too
    assert groups() == []
    assert not Path(folder).exists()
    psutil.wait_procs([orphan], timeout=5)
    assert not orphan.is_running() or orphan.status() == "zombie"


def test_a_sweep_leaves_alone_what_is_not_a_dead_workers(tmp_path: Path) -> None:
    other = roots.owned_prefix().replace(f"-{os.getpid()}-", "-4194304-")
    namespace, pid, start = roots.owned_prefix().removeprefix(roots.PREFIX).rstrip("-").split("-")
    kept = [
        f"{roots.owned_prefix()}mine", f"{roots.PREFIX}{int(namespace) + 1}-{pid}-1-other-container",
        "turnlog-sandbox-notes", "turnlog-egress-1-1-1-x", f"{other}link",
    ]  # fmt: skip
    for name in kept[:-1]:
        (tmp_path / name).mkdir()
    (tmp_path / kept[-1]).symlink_to(tempfile.gettempdir())
    gone = [f"{other}dead", f"{roots.PREFIX}{namespace}-{pid}-{int(start) - 1}-pid-came-round-again"]
    for name in gone:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    assert roots.sweep_folders(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
