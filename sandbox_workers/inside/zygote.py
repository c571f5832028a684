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
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable

from turnlog.sandbox_workers.inside import init
from turnlog.sandbox_workers.inside.child import prctl
from turnlog.sandbox_workers.inside.frames import Control, ControlClosed, Socket, frame
from turnlog.sandbox_workers.inside.processes import InitEnvironment
from turnlog.sandbox_workers.inside.workspace import copy_tree

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
AT_FDCWD = -100
SIOCSIFFLAGS = 0x8914
LOOPBACK_UP = struct.pack("16sh22x", b"lo", 1)
"""struct ifreq of netdevice(7) with IFF_UP."""
OURSELVES, NO_CAPABILITIES = struct.pack("@Ii", 0x20080522, 0), bytes(24)
"""Arguments of capset(2), version 3."""
CLONE = {"x86_64": 56, "aarch64": 220, "riscv64": 220}.get(os.uname().machine)
"""Number of clone(2) on this machine, if it is known; all take the flags first."""
REHEARSALS = 9
"""CPython specializes a function at its eighth call (3.11), or sooner."""
PASSED_BYTES = socket.CMSG_LEN(struct.calcsize("i"))
"""Bytes of the message by which a control socket comes."""
EMPTY, NOTHING = "/opt/empty", "/opt/nothing"
"""A folder and a device of the root that cover others: read-only, and no device can be opened there."""
IMAGE = "/opt/image"
"""Folder of the root that shows the image's own content of the workspace's folders, by their numbers."""
_libc = ctypes.CDLL(None, use_errno=True)
# Looked up before the first fork: the first use of a name makes an object, which each init would do again.
_capset, _chdir, _close, _ioctl, _kill = _libc.capset, _libc.chdir, _libc.close, _libc.ioctl, _libc.kill
_mount, _setsid, _socket, _syscall, _utimensat, _wait = (
    _libc.mount, _libc.setsid, _libc.socket, _libc.syscall, _libc.utimensat, _libc.wait
)  # fmt: skip
Step = tuple[Callable[..., int], tuple[object, ...], str]
"""Function of the C library, its arguments, and what it is about."""


def main(orders: str, filter_fd: str, disk_bytes: str, network: str, cwd: str, count: str, *paths: str) -> None:
    """Fork an init for every order, until the worker is gone.

    `orders`: descriptor of the socket by which control sockets come. `filter_fd`: descriptor of two BPF programs for
    seccomp(2), for us and, in addition, for inits, after the length of the first; or -1. `paths`: the writable folders,
    each of at most `disk_bytes`. The first `count` of them are the workspace's, each with a copy of what IMAGE has
    there under its number, and `cwd` is the working directory in them."""
    own, denied = _filters(int(filter_fd))
    if os.getpid() != 1:  # otherwise kill(-1) would end more than sandboxes
        raise SystemExit("the zygote of a slot's sandboxes must be pid 1")
    folders = list(paths)
    roots = tuple(folders[: int(count)])
    place = InitEnvironment(folders, True, True, roots, cwd)
    init.protect(place)
    rehearse(place)
    init.freeze()
    steps = plan_mounts(folders, int(disk_bytes), find_masked_paths())
    try:
        set_user_limits()
        if own:
            deny(own)
        with socket.socket(fileno=int(orders)) as worker:
            worker.set_inheritable(False)
            while (control := _order(worker)) >= 0:
                _end()
                if not fork_into_namespaces():
                    _close(worker.fileno())
                    _serve(control, place, network, steps, denied)
                os.close(control)
    except OSError as error:
        raise SystemExit(f"{REFUSED}: {error}") from error
    _end()


class Rehearsal(Control):
    """A control socket that requests calls of our own, and to which nobody listens."""

    def __init__(self, requests: bytes) -> None:
        self._requests = requests
        self._silent = socket.socketpair()
        """Sockets without a message."""

    def fileno(self) -> int:
        return self._silent[0].fileno()

    def outgoing(self) -> int:
        return self._silent[0].fileno()

    def recv(self, most: int) -> bytes:
        part, self._requests = self._requests[:most], self._requests[most:]
        return part

    def sendall(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        """Close the sockets."""
        for end in self._silent:
            end.close()


def rehearse(place: InitEnvironment) -> None:
    """Serve some calls before the first fork. CPython fills its caches and specializes bytecode meanwhile, in pages
    that every init then shares with us instead of copying them: a tenth of the page faults of a call."""
    source = b"print()"
    head = {
        "op": "exec", "kind": "python", "argv": [], "env": {}, "cwd": "", "silence_s": 60.0, "source": len(source),
        "alive": False, "prompt": False, "agent": False,
        "limits": {"cpu_s": 60, "wall_s": 60, "memory_bytes": 1 << 28, "pids": 16, "disk_bytes": 1 << 20,
                   "output_bytes": 1024},
    }  # fmt: skip
    requests = Rehearsal(frame(head, source) * REHEARSALS)
    with contextlib.suppress(ControlClosed):
        init.Service(requests, place, lazily=True).serve()
    requests.close()


def _order(worker: socket.socket) -> int:
    """Receive one descriptor; -1 if the worker is gone. (socket.recv_fds would import a module each time.)"""
    passed = worker.recvmsg(1, PASSED_BYTES)[1]
    return int.from_bytes(passed[0][2], sys.byteorder) if passed else -1


def _filters(number: int) -> tuple[bytes, bytes]:
    if number < 0:
        return b"", b""
    with open(number, "rb") as file:
        own = file.read(int.from_bytes(file.read(4), "big"))
        return own, file.read()


def _serve(control: int, place: InitEnvironment, network: str, steps: list[Step], denied: bytes) -> None:
    """Run the init. Never returns."""
    code = 1
    try:
        set_up_namespaces(steps, denied)
        fill_roots(place)
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
    _kill(-1, signal.SIGKILL)
    while _wait(None) > 0:
        pass


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
    if CLONE is None:
        raise OSError(errno.ENOSYS, f"the number of clone(2) on {os.uname().machine} is not known here")
    pid = int(_syscall(CLONE, NEW | signal.SIGCHLD, None, None, None, None))
    _check_errno(min(pid, 0), "namespaces of its own")
    return pid


def plan_mounts(folders: list[str], disk_bytes: int, masks: tuple[list[str], list[str]]) -> list[Step]:
    """Return the mounts of a sandbox, ready to be made: an init that prepared them would copy more pages of memory than
    the mounts themselves touch. `folders`: writable ones, each a tmpfs of `disk_bytes`; `masks`: see
    `find_masked_paths`."""
    plan = [
        ("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, ""),
        ("/proc/sys", "/proc/sys", "", MS_BIND, ""),
        ("", "/proc/sys", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, ""),
    ]
    for paths, source in zip(masks, (NOTHING, EMPTY)):  # noqa: B905 - Python 3.9
        plan += [(source, path, "", MS_BIND, "") for path in paths]
    plan += [("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0700,size={disk_bytes}") for folder in folders]
    terminals = f"newinstance,ptmxmode=0666,mode=620,max={TERMINALS}"
    plan.append(("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, terminals))
    steps: list[Step] = [
        (_mount, (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()), target)
        for source, target, kind, flags, options in plan
    ]
    # Times of folders reveal nothing, as after `observables.reset_folder_times`.
    steps += [(_utimensat, (AT_FDCWD, folder.encode(), bytes(32), 0), folder) for folder in folders]
    return [*steps, (_chdir, (folders[0].encode(),), folders[0])]


def set_up_namespaces(steps: list[Step], denied: bytes) -> None:
    """Set up new namespaces from their first process: loopback and mounts, then give up all capabilities. `steps`: see
    `plan_mounts`; `denied`: a BPF program for seccomp(2), or empty. Raises OSError.

    The C library is called directly: the modules of Python for the same calls cost 200 page faults more."""
    _setsid()
    loopback = _socket(socket.AF_INET, socket.SOCK_DGRAM, 0)
    _check_errno(_ioctl(loopback, SIOCSIFFLAGS, LOOPBACK_UP), "lo")
    _close(loopback)
    for call, arguments, what in steps:
        _check_errno(call(*arguments), what)
    _drop_capabilities()
    if denied:
        deny(denied)


def fill_roots(place: InitEnvironment) -> None:
    """Copy what the image has in the folders that make up the workspace, and enter the working directory. Raises
    OSError."""
    for number, root in enumerate(place.roots):
        source = f"{IMAGE}/{number}"
        if os.path.isdir(source):
            copy_tree(source, root)
            os.utime(root, (0, 0))
    if place.roots:
        os.makedirs(place.cwd, exist_ok=True)
        os.chdir(place.cwd)


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
    _check_errno(_capset(OURSELVES, NO_CAPABILITIES), "giving capabilities up")


def _check_errno(failed: int, what: str) -> None:
    """Raise OSError if a call failed. `failed` is what it returned, or an errno."""
    if failed:
        number = ctypes.get_errno() if failed < 0 else failed
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
