"""Ways out through the kernel: mounts, namespaces, other tables of system calls, modules, devices, /proc and /sys.

Each attempt is answered EPERM by the seccomp filter where the kernel might have said yes to somebody, ENOSYS where
libraries must fall back, and by SIGSYS where the call came by another architecture's table.
"""

from __future__ import annotations

import platform
import socket
from typing import Any

import pytest
import pytest_asyncio

from tests.each import each
from turnlog.sandbox_workers.backends import seccomp
from turnlog.schemas.events import ToolStatus

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALLS = {
    "mount a tmpfs over the workspace": ('call("mount", b"none", b"/workspace", b"tmpfs", 0, 0)', "EPERM"),
    "mount another /proc": ('call("mount", b"proc", b"/tmp", b"proc", 0, 0)', "EPERM"),
    "mount the host's control groups": ('call("mount", b"none", b"/tmp", b"cgroup2", 0, 0)', "EPERM"),
    "remount /usr writable": ('call("mount", 0, b"/usr", 0, 32 | 4096, 0)', "EPERM"),
    "remount / writable": ('call("mount", 0, b"/", 0, 32, 0)', "EPERM"),
    "take a mask off /proc": ('call("umount2", b"/proc/cmdline", 2)', "EPERM"),
    "unmount /usr lazily": ('call("umount2", b"/usr", 2)', "EPERM"),
    "pivot the root back": ('call("pivot_root", b".", b".")', "EPERM"),
    "chroot into the workspace": ('call("chroot", b"/workspace")', "EPERM"),
    "move a mount": ('call("move_mount", -1, b"", -100, b"/workspace", 4)', "EPERM"),
    "open a file system": ('call("fsopen", b"tmpfs", 0)', "EPERM"),
    "configure a file system": ('call("fsconfig", -1, 6, 0, 0, 0)', "EPERM"),
    "make a mount of a file system": ('call("fsmount", -1, 0, 0)', "EPERM"),
    "pick a mounted file system": ('call("fspick", -100, b"/usr", 0)', "EPERM"),
    "clone a tree of mounts": ('call("open_tree", -100, b"/usr", 1)', "EPERM"),
    "change a mount's attributes": ('call("mount_setattr", -100, b"/usr", 0, 0, 0)', "EPERM"),
    "a new user namespace": ('call("unshare", 0x10000000)', "EPERM"),
    "a new mount namespace": ('call("unshare", 0x00020000)', "EPERM"),
    "a new network namespace": ('call("unshare", 0x40000000)', "EPERM"),
    "a new time namespace": ('call("unshare", 0x00000080)', "EPERM"),
    "a child in a user namespace": ('call("clone", 0x10000000 | 17, 0, 0, 0, 0)', "EPERM"),
    "a child in pid and mount namespaces": ('call("clone", 0x20020000 | 17, 0, 0, 0, 0)', "EPERM"),
    "a child by clone3": ('call("clone3", 0, 0)', "ENOSYS"),
    "enter a namespace": ('call("setns", os.open("/proc/self/ns/net", 0), 0)', "EPERM"),
    "add a key": ('call("add_key", b"user", b"name", b"x", 1, -3)', "EPERM"),
    "request a key": ('call("request_key", b"user", b"name", 0, -3)', "EPERM"),
    "join the session keyring": ('call("keyctl", 1, 0)', "EPERM"),
    "load a BPF program": ('call("bpf", 5, 0, 0)', "EPERM"),
    "open a performance counter": ('call("perf_event_open", 0, 0, -1, -1, 0)', "EPERM"),
    "handle page faults": ('call("userfaultfd", 1)', "EPERM"),
    "an io_uring": ('call("io_uring_setup", 1, 0)', "EPERM"),
    "enter an io_uring": ('call("io_uring_enter", -1, 1, 0, 0, 0, 0)', "EPERM"),
    "register with an io_uring": ('call("io_uring_register", -1, 0, 0, 0)', "EPERM"),
    "load a module": ('call("init_module", b"", 0, b"")', "EPERM"),
    "load a module from a file": ('call("finit_module", 0, b"", 0)', "EPERM"),
    "remove a module": ('call("delete_module", b"nothing", 0)', "EPERM"),
    "load another kernel": ('call("kexec_load", 0, 0, 0, 0)', "EPERM"),
    "reboot with wrong magic": ('call("reboot", 0, 0, 0, 0)', "EPERM"),
    "swap on": ('call("swapon", b"/workspace/x", 0)', "EPERM"),
    "swap off": ('call("swapoff", b"/workspace/x")', "EPERM"),
    "set the time of day": ('call("settimeofday", 0, 0)', "EPERM"),
    "set the clock": ('call("clock_settime", 0, 0)', "EPERM"),
    "slew the clock": ('call("adjtimex", 0)', "EPERM"),
    "set the host's name": ('call("sethostname", b"x", 1)', "EPERM"),
    "set the domain's name": ('call("setdomainname", b"x", 1)', "EPERM"),
    "read the kernel's log": ('call("syslog", 3, 0, 0)', "EPERM"),
    "open a file by handle": ('call("open_by_handle_at", -100, 0, 0)', "EPERM"),
    "make a file handle": ('call("name_to_handle_at", -100, b"/usr", 0, 0, 0)', "EPERM"),
    "switch address randomisation off": ('call("personality", 0x0040000)', "EPERM"),
    "set a quota": ('call("quotactl", 0, 0, 0, 0)', "EPERM"),
    "switch accounting on": ('call("acct", b"/workspace/x")', "EPERM"),
    "watch a file system": ('call("fanotify_init", 0, 0)', "EPERM"),
    "System V shared memory": ('call("shmget", 0, 4096, 0o1600)', "EPERM"),
    "a System V queue": ('call("msgget", 0, 0o1600)', "EPERM"),
    "a System V semaphore": ('call("semget", 0, 1, 0o1600)', "EPERM"),
    "a POSIX queue": ('call("mq_open", b"x", 0o102, 0o600, 0)', "EPERM"),
    "a queue of asynchronous reads": ('call("io_setup", 1, b"12345678")', "EPERM"),
    "the signal of a descriptor": ("import fcntl; tried(fcntl.fcntl, 0, 10, 9)", "EPERM"),
    "a lease on a shared file": ('import fcntl; tried(fcntl.fcntl, os.open(sys.executable, 0), 1024, 0)', "EPERM"),
    "signals of a folder": ('import fcntl; tried(fcntl.fcntl, os.open("/usr", 0), 1026, 1)', "EPERM"),
    "a pair of packet sockets": ("tried(socket.socketpair, 17, 2)", "EAFNOSUPPORT"),
    "a pair of TIPC sockets": ("tried(socket.socketpair, 30, 2)", "EAFNOSUPPORT"),
    "SCTP": ("tried(socket.socket, 2, 1, 132)", "EPROTONOSUPPORT"),
    "MPTCP": ("tried(socket.socket, 10, 1, 262)", "EPROTONOSUPPORT"),
    "UDP-Lite, high bits set": ('call("socket", 2, 2, 1 << 32 | 136)', "EPROTONOSUPPORT"),
    "a call newer than the filter": ("answer(libc.syscall(1000))", "ENOSYS"),
    "type into a terminal": ("answer(libc.ioctl(0, 0x5412, b'x'))", "EPERM"),
    "paste into the console": ("answer(libc.ioctl(0, 0x541C, b'x'))", "EPERM"),
    "type into a terminal, high bits set": ("answer(libc.ioctl(0, ctypes.c_ulong(1 << 32 | 0x5412), b'x'))", "EPERM"),
    "a character device": ('tried(os.mknod, "d", 0o20600, os.makedev(1, 1))', "EPERM"),
    "a block device": ('tried(os.mknod, "d", 0o60600, os.makedev(254, 0))', "EPERM"),
    "become root": ("tried(os.setuid, 0)", "EINVAL"),
    "join root's group": ("tried(os.setgid, 0)", "EINVAL"),
    "drop or take groups": ("tried(os.setgroups, [0])", "EPERM"),
    "run in real time": ("tried(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))", "EPERM"),
    "be nicer to oneself": ("tried(os.setpriority, os.PRIO_PROCESS, 0, -5)", "EACCES"),
    "give a file to root": ('open("f", "w"); tried(os.chown, "f", 0, 0)', "EINVAL"),
    "hide from the memory killer": (
        'tried(os.write, os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-500")',
        "EACCES",
    ),
}  # fmt: skip
FILES = {
    "the host's name": ("/proc/sys/kernel/hostname", "w"),
    "where cores go": ("/proc/sys/kernel/core_pattern", "w"),
    "programs started by the kernel": ("/proc/sys/kernel/modprobe", "w"),
    "forwarding of packets": ("/proc/sys/net/ipv4/ip_forward", "w"),
    "memory overcommitment": ("/proc/sys/vm/overcommit_memory", "w"),
    "the kernel's start words": ("/proc/cmdline", "r"),
    "the kernel's symbols": ("/proc/kallsyms", "r"),
    "the kernel's memory": ("/proc/kcore", "r"),
    "the kernel's log": ("/proc/kmsg", "r"),
    "keys": ("/proc/keys", "r"),
    "system requests": ("/proc/sysrq-trigger", "w"),
    "uevents": ("/sys/kernel/uevent_helper", "w"),
    "control groups": ("/sys/fs/cgroup/cgroup.procs", "w"),
    "memory": ("/dev/mem", "r"),
    "the disk": ("/dev/vda", "r"),
    "the first disk": ("/dev/sda", "r"),
    "virtual machines": ("/dev/kvm", "r+b"),
    "file systems in programs": ("/dev/fuse", "r+b"),
    "the log device": ("/dev/kmsg", "r"),
    "network tunnels": ("/dev/net/tun", "r+b"),
}
FAMILIES = {
    "packets": 17, "the hypervisor": 40, "the kernel's ciphers": 38, "bluetooth": 31, "CAN": 29, "TIPC": 30, "XDP": 44,
    "an old protocol": 4, "no family": 0, "no family either": 70,
}  # fmt: skip


DEVICES = {
    "core", "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero",
}  # fmt: skip
FOREIGN = {
    "by the 32 bit table": "b8 14 00 00 00 cd 80 c3",  # mov eax, getpid of i386; int 0x80
    "by the x32 table": "b8 27 00 00 40 0f 05 c3",  # mov eax, x32 bit | getpid; syscall
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def answers(lab: Any) -> dict[str, list[str]]:
    """What came of CALLS, FILES and FAMILIES."""
    opened = {f"file {name}": f"tried(open, {path!r}, {mode!r})" for name, (path, mode) in FILES.items()}
    sockets = {f"socket {name}": f"tried(socket.socket, {number}, 2)" for name, number in FAMILIES.items()}
    found: dict[str, list[str]] = await lab.each({name: source for name, (source, _) in CALLS.items()})
    return found | await lab.each(opened | sockets)


@each("name", CALLS)
async def test_a_system_call_that_leads_out_is_refused(answers: dict[str, list[str]], name: str) -> None:
    assert seccomp.program(), "this machine has no libseccomp"
    assert answers[name] == [CALLS[name][1]]


@pytest.mark.parametrize("name", FOREIGN if platform.machine() == "x86_64" else [])
async def test_a_system_call_of_another_architecture_ends_the_process(lab: Any, name: str) -> None:
    answer = await lab.python(f"""
        import mmap
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(bytes.fromhex({FOREIGN[name]!r}))
        run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        print("it answered", run())
    """)
    assert (answer.status, answer.exit_code, answer.output) == (ToolStatus.tool_error, 128 + 31, b"")


@each("name", FILES)
async def test_a_file_of_the_kernels_cannot_be_opened(answers: dict[str, list[str]], name: str) -> None:
    (said,) = answers[f"file {name}"]
    assert said in ("EACCES", "EROFS", "ENOENT", "EPERM")
    if FILES[name][0].startswith("/sys"):
        assert said == "ENOENT"


async def test_there_are_no_devices_but_the_harmless(lab: Any) -> None:
    assert set(await lab.words("print(*os.listdir('/dev'))")) <= DEVICES
    assert await lab.words("print(os.path.exists('/sys'), os.listdir('/dev/pts'))") == ["False", "['ptmx']"]


async def test_what_proc_tells_of_the_machines_devices_is_hidden(lab: Any) -> None:
    said = await lab.words("""
        for name in ("acpi", "asound", "scsi", "fs", "bus", "irq"):
            print(*(os.listdir(f"/proc/{name}") if os.path.exists(f"/proc/{name}") else []))
    """)
    assert said == []


async def test_every_mount_is_nosuid_and_all_but_the_workspaces_are_read_only(lab: Any) -> None:
    said = await lab.python("""
        for line in open("/proc/self/mountinfo"):
            before, _, after = line.partition(" - ")
            point, options = before.split()[4:6]
            if "nosuid" not in options.split(","):
                print("suid", point)
            if os.path.isdir(point) and os.access(point, os.W_OK):
                try:
                    open(f"{point}/file", "w")
                except OSError as error:
                    assert point == "/dev/pts" and error.errno == errno.EACCES, (point, error)  # it takes no files
                else:
                    print("writable", point)
    """)
    assert said.output.decode().splitlines() == ["writable /workspace", "writable /tmp", "writable /dev/shm"]


async def test_there_are_no_capabilities_and_none_can_be_had(lab: Any) -> None:
    said = await lab.shell("grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status; unshare -Ur id; sudo id; su -c id")
    lines = [line.split(":\t") for line in said.output.decode().splitlines() if ":\t" in line]
    assert dict(lines) == dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0" * 16) | {
        "NoNewPrivs": "1",
        "Seccomp": "2",
    }
    assert b"uid=0" not in said.output


async def test_a_setuid_program_runs_as_its_caller(lab: Any) -> None:
    said = await lab.python("""
        import shutil, stat, subprocess
        shutil.copy(shutil.which("id"), "own")
        os.chmod("own", 0o6755)
        print(subprocess.run(["./own", "-u"], capture_output=True, text=True).stdout.strip())
        found = [entry for entry in os.scandir("/usr/bin") if entry.is_file() and entry.stat().st_mode & stat.S_ISUID]
        for entry in found:
            subprocess.run([entry.path], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
        print({entry.stat().st_uid for entry in found} - {65534})
    """)
    assert said.output.decode() == "1000\nset()\n", "root's files belong to nobody inside, so nobody can be become"


@each("name", FAMILIES)
async def test_a_socket_of_an_odd_family_is_refused(answers: dict[str, list[str]], name: str) -> None:
    assert answers[f"socket {name}"] == ["EAFNOSUPPORT"]


async def test_the_hosts_name_and_where_its_cores_go_are_as_they_were(lab: Any) -> None:
    def here() -> tuple[str, bytes]:
        with open("/proc/sys/kernel/core_pattern", "rb") as file:
            return socket.gethostname(), file.read()

    before = here()
    await lab.python("open('/proc/sys/kernel/core_pattern', 'w').write('|/workspace/x')")
    await lab.python("socket.sethostname('evil')")
    assert here() == before
    assert await lab.words("print(socket.gethostname())") == ["sandbox"]
