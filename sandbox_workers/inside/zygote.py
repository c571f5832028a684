"""The warm process from which every init of a slot is forked, each into its own namespaces. It runs nothing of agents.

So a new sandbox costs a fork instead of an interpreter's start. The zygote is pid 1 of bubblewrap's namespaces, has
CAPABILITIES in their user namespace alone, and is invisible to every process of a sandbox. It takes one kind of order:
a byte with the control socket of the next init. Processes of the previous sandbox are dead then, and its namespaces go
with them. An init gives up everything that allowed it to enter its namespaces.

Source: namespaces(7), capabilities(7), mount(2), devpts and tmpfs of the kernel's filesystems documentation."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable

from turnlog.sandbox_workers.inside import init
from turnlog.sandbox_workers.inside.child import prctl
from turnlog.sandbox_workers.inside.frames import Socket
from turnlog.sandbox_workers.inside.processes import InitEnvironment

REFUSED = "a sandbox cannot have namespaces of its own"

CAPABILITIES = {"CAP_SETPCAP": 8, "CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21, "CAP_SYS_RESOURCE": 24}
"""Capabilities that `set_user_limits`, `forked` and `set_up_namespaces` need, with their numbers."""
NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET of clone(2)."""
TERMINALS = 64
"""Maximum number of pseudo-terminals of one sandbox. The machine has 4,096 (kernel.pty.max) for all that runs on it."""
USER_LIMITS = {"max_inotify_instances": 24, "max_inotify_watches": 8192}
"""Limits of one sandbox in /proc/sys/user: the machine counts by user, and the slots of a worker that is not root share
one."""
MASKED_FILES = (
    "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/latency_stats",
    "/proc/interrupts", "/proc/kallsyms", "/proc/cmdline",
)  # fmt: skip
MASKED_FOLDERS = ("/proc/acpi", "/proc/asound", "/proc/scsi", "/proc/fs", "/proc/bus", "/proc/irq")
"""Paths of /proc that container runtimes hide, and others that reveal the host's devices and how it was started. Files
that only root of the host may read are closed to a sandbox's user anyway, and cost no mount."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
INSTRUCTION_BYTES = 8
CAPABILITY_VERSION_3 = 0x20080522
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
SYS_CLONE = {"x86_64": 56, "aarch64": 220, "riscv64": 220}
"""Number of clone(2), by machine; all take the flags first."""
EMPTY, NOTHING = "/opt/empty", "/opt/nothing"
"""A folder and a device of the root that cover others: read-only, and no device can be opened there."""
_libc = ctypes.CDLL(None, use_errno=True)


def main(orders: str, filter_fd: str, disk_bytes: str, network: str, *paths: str) -> None:
    """Fork an init for every order, until the worker is gone.

    `orders`: descriptor of the socket by which control sockets come. `filter_fd`: descriptor of two BPF programs for
    seccomp(2), for us and, in addition, for inits, after the length of the first; or -1. `paths`: the writable folders,
    each of at most `disk_bytes`."""
    own, denied = _filters(int(filter_fd))
    if os.getpid() != 1:  # otherwise kill(-1) would end more than sandboxes
        raise SystemExit("the zygote of a slot's sandboxes must be pid 1")
    folders = list(paths)
    place = InitEnvironment(folders, own_user=True, namespace=True)
    init.protect(place)
    init.freeze()
    masks = find_masked_paths()
    try:
        set_user_limits()
        if own:
            deny(own)
        with socket.socket(fileno=int(orders)) as worker:
            worker.set_inheritable(False)
            while controls := _order(worker):
                _end()
                if not fork_into_namespaces():
                    worker.close()
                    enter = functools.partial(set_up_namespaces, folders, int(disk_bytes), masks, denied)
                    _serve(controls[0], place, network, enter)
                os.close(controls[0])
    except OSError as error:
        raise SystemExit(f"{REFUSED}: {error}") from error
    _end()


def _order(worker: socket.socket) -> list[int]:
    """Receive one descriptor; empty if the worker is gone."""
    return socket.recv_fds(worker, 1, 1)[1]


def _filters(number: int) -> tuple[bytes, bytes]:
    if number < 0:
        return b"", b""
    with open(number, "rb") as file:
        own = file.read(int.from_bytes(file.read(4), "big"))
        return own, file.read()


def _serve(control: int, place: InitEnvironment, network: str, enter: Callable[[], None]) -> None:
    """Run the init. Never returns."""
    code = 1
    try:
        enter()
        init.serve(Socket(control), place, network, forked=True)
        code = 0
    except OSError as error:
        os.write(2, f"{REFUSED}: {error}\n".encode())
    except BaseException:  # show it as an exiting interpreter would; never continue as a second zygote
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _end() -> None:
    """Kill and reap all other processes."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


class Program(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def set_user_limits() -> None:
    """Set the limits that the kernel counts by user for our whole user namespace. Raises OSError."""
    for name, most in USER_LIMITS.items():
        with open(f"/proc/sys/user/{name}", "w") as file:
            file.write(str(most))


def find_masked_paths() -> tuple[list[str], list[str]]:
    """Return the files and folders of /proc that exist here and are readable by all."""
    files = [path for path in MASKED_FILES if os.access(path, os.R_OK)]
    return files, [path for path in MASKED_FOLDERS if os.access(path, os.R_OK) and os.listdir(path)]


def fork_into_namespaces() -> int:
    """Fork into new namespaces, of which the child is the first process. Returns as `os.fork` does. Raises OSError.

    Calls clone(2) directly: unshare(2) would need another process in between, since it leaves us in our pid namespace.
    We have one thread, with the same number here and there, so no lock has to be repaired in the child and no hook of
    `os.register_at_fork` has to run, which would cost more than the rest."""
    number = SYS_CLONE.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of clone(2) on {os.uname().machine} is not known here")
    pid = int(_libc.syscall(number, NEW | signal.SIGCHLD, None, None, None, None))
    _check_errno(min(pid, 0), "namespaces of its own")
    return pid


def set_up_namespaces(folders: list[str], disk_bytes: int, masks: tuple[list[str], list[str]], denied: bytes) -> None:
    """Set up new namespaces from their first process: file systems and loopback, then give up all capabilities.
    `folders`: writable ones, each a tmpfs of `disk_bytes`; `masks`: see `find_masked_paths`; `denied`: a BPF program
    for seccomp(2), or empty. Raises OSError."""
    os.setsid()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount("/proc/sys", "/proc/sys", "", MS_BIND)
    _mount("", "/proc/sys", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for paths, source in zip(masks, (NOTHING, EMPTY)):  # noqa: B905 - Python 3.9
        for path in paths:
            _mount(source, path, "", MS_BIND)
    for folder in folders:
        _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0700,size={disk_bytes}")
    terminals = f"newinstance,ptmxmode=0666,mode=620,max={TERMINALS}"
    _mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, terminals)
    os.chdir(folders[0])
    _drop_capabilities()
    if denied:
        deny(denied)


def deny(program: bytes) -> None:
    """Install a seccomp filter in addition to existing ones; a system call is refused if any of them refuses it. Raises
    OSError."""
    about = Program(len(program) // INSTRUCTION_BYTES, program)
    _check_errno(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(about), 0, 0), "the seccomp filter")


def _drop_capabilities() -> None:
    """Drop all capabilities, permanently."""
    _check_errno(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    for number in CAPABILITIES.values():
        _check_errno(prctl(PR_CAPBSET_DROP, number, 0, 0, 0), "the bounding set")
    header, none = struct.pack("@Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    _check_errno(_libc.capset(header, none), "giving capabilities up")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _check_errno(
        _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()), target
    )


def _check_errno(failed: int, what: str) -> None:
    """Raise OSError if a call failed. `failed` is what it returned, or an errno."""
    if failed:
        number = ctypes.get_errno() if failed < 0 else failed
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
