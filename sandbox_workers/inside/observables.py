"""The state that must be as it was before the first call, by name; how to restore it; and what no call may change.

A sandbox is as new if every observable is equal to its first value. Observables belong to the init, which a call can
reach from outside, and to the namespaces around it, which outlive a call's processes. Each is a JSON value, and read in
less than 0.3 ms (/proc/locks and /proc/net/arp take ten). Source: proc(5), sched_getattr(2), ioprio_get(2),
namespaces(7).

A call can change the init's own limits, since prlimit(2) works between processes of one user, and the writable folders
themselves. If one of them was changed, the sandbox ends and the worker is notified which, so that nobody else is
blamed."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import socket
import stat
import struct
import sys
from _blake2 import blake2b
from collections.abc import Callable
from typing import Any

from turnlog.sandbox_workers.inside.child import prctl
from turnlog.sandbox_workers.inside.frames import Control, ControlClosed, frame
from turnlog.sandbox_workers.inside.processes import InitEnvironment, others

FS_IOC_GETFLAGS = 0x80086601
"""Request number from ioctl_iflags(2)."""
SETTABLE = 0x000380FF
"""FS_FL_USER_MODIFIABLE of linux/fs.h. The kernel itself sets other flags, such as that a folder once had many
entries."""
PR_GET_TIMERSLACK = 30
NUMBERS = {"x86_64": (315, 252), "aarch64": (275, 31), "riscv64": (275, 31)}
"""Numbers of sched_getattr(2) and ioprio_get(2), for which the C library has no names, by machine."""
SCHEDULING_BYTES = 56
"""Size of struct sched_attr with its clamps of utilisation."""
IPC = ("msgmax", "msgmnb", "msgmni", "sem", "shm_rmid_forced", "shmall", "shmmax", "shmmni")
QUEUES = ("msg_default", "msg_max", "msgsize_default", "msgsize_max", "queues_max")
NETWORK = ("ipv4/ip_local_port_range", "ipv4/ip_unprivileged_port_start", "ipv4/ping_group_range", "core/somaxconn")
STATUS = frozenset({
    "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd",
    "CapAmb", "NoNewPrivs", "Seccomp_filters", "Umask", "Threads", "Mems_allowed",
})  # fmt: skip
"""Fields of /proc/self/status: signals that are pending, blocked, ignored or caught; identity and capabilities; umask,
threads, memory nodes."""
MOST_BYTES = 1 << 16
_syscall = ctypes.CDLL(None, use_errno=True).syscall
Look = Callable[[InitEnvironment], Any]

AGENTS = ("user.", "system.posix_acl_")
"""Prefixes of attributes that the owner of a folder may set (xattr(7))."""

PROXY_PORT = 3128
"""Port at which a sandbox finds the worker's egress proxy on its own loopback."""
TABLES = ("sockstat", "sockstat6")
OURS = ("inuse", "tw")
"""Counters of these tables that belong to a network namespace; the others are the machine's (net/ipv4/proc.c)."""

LIMITS = range(16)
"""Every RLIMIT_ of Linux."""
TOLD = {what: frame({"changed": what}) for what in ("limits", "folders")}
"""Frames that report a change. They are built beforehand, because an init whose limits were lowered may be unable
to."""


def read_observables(place: InitEnvironment) -> dict[str, Any]:
    """Return all observables; the value is None where the kernel does not show it. Raises OSError."""
    seen = OWN if not place.namespace else {**OWN, **AROUND}
    return {name: look(place) for name, look in seen.items()}


def _text(path: str) -> str | None:
    """Read a file; avoids the layers of `open`, which cost more than the kernel does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the kernel lacks the file or denies access
        return None
    try:
        text = b""
        while part := os.read(descriptor, MOST_BYTES):
            text += part
        return text.decode(errors="backslashreplace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _texts(folder: str, names: tuple[str, ...]) -> list[str | None]:
    return [_text(f"{folder}/{name}") for name in names]


def _digest(value: object) -> str:
    return blake2b(repr(value).encode(errors="backslashreplace"), digest_size=16).hexdigest()


def _status(_: InitEnvironment) -> list[str]:
    """Return the relevant lines of our /proc/self/status."""
    lines = (_text("/proc/self/status") or "").splitlines()
    return [line for line in lines if line.partition(":")[0] in STATUS]


def _invoke_syscall(which: int, *arguments: Any) -> int | None:
    number = NUMBERS.get(platform.machine())
    return None if number is None else int(_syscall(number[which], *arguments))


def _scheduling(_: InitEnvironment) -> str:
    """Return policy, flags, nice value, priority, slice and clamps."""
    about = ctypes.create_string_buffer(SCHEDULING_BYTES)
    return f"{_invoke_syscall(0, 0, about, SCHEDULING_BYTES, 0)} {about.raw.hex()}"


def _autogroup(_: InitEnvironment) -> str | None:
    """Return the autogroup's nice value, without its number, which differs for every session."""
    text = _text("/proc/self/autogroup")
    return None if text is None else text.partition(" ")[2]


def _descriptors(_: InitEnvironment) -> list[int]:
    """Return the file types of our open descriptors."""
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed again
            kinds.append(stat.S_IFMT(os.fstat(int(name)).st_mode))
    return sorted(kinds)


def _folder(path: str) -> list[Any]:
    """Return rights, owner, times, flags, attributes and contents of a folder. The times are read first."""
    about = os.stat(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flags = fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, bytes(8))
    except OSError:
        flags = bytes(8)  # this file system has none
    finally:
        os.close(descriptor)
    settable = struct.unpack("@l", flags)[0] & SETTABLE
    times = about.st_mtime_ns, about.st_atime_ns
    return [about.st_mode, about.st_uid, about.st_gid, *times, settable, os.listxattr(path), os.listdir(path)]


def _objects(_: InitEnvironment) -> list[int | None]:
    """Return the number of System V objects of each kind, which outlive processes. A table has one title line."""
    return [len((_text(f"/proc/sysvipc/{table}") or "\n").splitlines()) - 1 for table in ("shm", "sem", "msg")]


def _unix(_: InitEnvironment) -> int:
    """Return the number of unix sockets, including abstract names and those in flight."""
    return len((_text("/proc/net/unix") or "").splitlines())


def _mounts(_: InitEnvironment) -> str:
    """Return a digest of the mounts; without the numbers of mounts and devices, which differ between namespaces."""
    return _digest([line.split()[3:] for line in (_text("/proc/self/mountinfo") or "").splitlines()])


def _lines(path: str) -> Look:
    return lambda _: (_text(path) or "").splitlines()


OWN: dict[str, Look] = {
    "limits": lambda _: [resource.getrlimit(number) for number in range(16)],
    "nice": lambda _: os.getpriority(os.PRIO_PROCESS, 0),
    "scheduling": _scheduling,
    "I/O priority": lambda _: _invoke_syscall(1, 1, 0),
    "timer slack": lambda _: prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0),
    "autogroup": _autogroup,
    "out of memory score": lambda _: _text("/proc/self/oom_score_adj"),
    "core dump filter": lambda _: _text("/proc/self/coredump_filter"),
    "cores": lambda _: sorted(os.sched_getaffinity(0)),
    "signals, rights, umask, threads": _status,
    "working directory": lambda _: os.getcwd(),
    "environment": lambda _: _digest(sorted(os.environ.items())),
    "modules": lambda _: len(sys.modules),
    "descriptors": _descriptors,
    "processes": others,
    "folders": lambda place: [_folder(path) for path in place.folders],
}
"""Observables of the init and its folders."""


AROUND: dict[str, Look] = {
    "System V objects": _objects,
    "IPC settings": lambda _: [*_texts("/proc/sys/kernel", IPC), *_texts("/proc/sys/fs/mqueue", QUEUES)],
    "sockets": lambda _: sockets(),
    "unix sockets": _unix,
    "flow labels": _lines("/proc/net/ip6_flowlabel"),
    "network settings": lambda _: _texts("/proc/sys/net", NETWORK),
    "interfaces": lambda _: [socket.if_nameindex(), _text("/proc/net/if_inet6")],
    "routes": _lines("/proc/net/route"),
    "multicast groups": lambda _: len((_text("/proc/net/igmp") or "").splitlines()),
    "terminals": lambda _: sorted(os.listdir("/dev/pts")),
    "mounts": _mounts,
    "host and domain": lambda _: [platform.node(), _text("/proc/sys/kernel/domainname")],
    "user namespace": lambda _: _texts("/proc/sys/user", ("max_inotify_instances", "max_inotify_watches")),
    "clock offsets": lambda _: _text("/proc/self/timens_offsets"),
}
"""Observables of the namespaces. A process without any would see those of the host, which others change."""


def wipe(place: InitEnvironment, as_new: dict[str, Any] | None) -> bool:
    """Empty the writable folders. Return False if something is left, or if this process was tampered with."""
    try:
        empty(place)
        reset_folder_times(place)
        return read_observables(place) == as_new
    except (OSError, RecursionError):
        return False


def reset_folder_times(place: InitEnvironment) -> None:
    """Reset the times of the writable folders, so that they reveal nothing. Raises OSError."""
    for folder in place.folders:
        os.utime(folder, (0, 0))


def empty(place: InitEnvironment, folders: list[str] | None = None) -> None:
    """Remove everything from the writable folders, or from some of them, including their own attributes. Raises
    OSError, RecursionError."""
    for folder in place.folders if folders is None else folders:
        os.chmod(folder, 0o700)
        for name in os.listxattr(folder):
            if name.startswith(AGENTS):
                os.removexattr(folder, name)
        with os.scandir(folder) as entries:
            for entry in list(entries):
                _remove(entry.path)


def _remove(path: str) -> None:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    os.chmod(path, 0o700)
    found = [path]
    for parent, folders, names in os.walk(path):  # top down: a folder is made readable before it is entered
        for name in names:
            os.unlink(os.path.join(parent, name))
        for name in folders:
            inner = os.path.join(parent, name)
            if os.path.islink(inner):
                os.unlink(inner)
            else:
                os.chmod(inner, 0o700)
                found.append(inner)
    for folder in reversed(found):
        os.rmdir(folder)


def listener(*, namespace: bool) -> socket.socket:
    """Open the socket on which the egress proxy accepts. A socket belongs to the network namespace that it was made in,
    whoever holds it. On the host's loopback any free port is used, since all sandboxes share it."""
    return socket.create_server(("127.0.0.1", PROXY_PORT if namespace else 0), backlog=64)


def sockets() -> list[str]:
    """Return the number of sockets of each protocol, including those in TIME_WAIT. The tables that list TCP's one by
    one take 5 ms each, since the kernel walks a hash of the whole machine."""
    found = []
    for table in TABLES:
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{table}") as file:
            for line in file:
                protocol, *fields = line.split()
                found += [f"{protocol} {key} {n}" for key, n in zip(fields[::2], fields[1::2]) if key in OURS]  # noqa: B905
    with contextlib.suppress(FileNotFoundError), open("/proc/net/unix") as file:
        found.append(f"unix {len(file.readlines()) - 1}")
    return found


class Tampered(ControlClosed):
    """A call has changed what it may not; the worker has been notified, and nothing more is served."""


class Integrity:
    """Check that limits and folders are as they were when the init began to serve."""

    def __init__(self, place: InitEnvironment, control: Control) -> None:
        self.place = place
        self.control = control
        self.limits = list(map(resource.getrlimit, LIMITS))
        self.folders = list(map(os.stat, place.folders))

    def check(self) -> None:
        """Check the limits. Needs no descriptor and hardly any memory. Raises Tampered."""
        for number in LIMITS:
            if resource.getrlimit(number) != self.limits[number]:
                self._tell("limits")

    def settle(self) -> None:
        """Check the folders after a call, when nothing of it runs, and restore their rights: the owner of a folder may
        take every right to it away, but not for later calls. Raises Tampered."""
        self.check()
        for path, before in zip(self.place.folders, self.folders):  # noqa: B905 - images may have Python 3.9
            try:
                about = os.lstat(path)
                if not os.path.samestat(about, before):
                    self._tell("folders")
                if about.st_mode != before.st_mode:
                    os.chmod(path, stat.S_IMODE(before.st_mode))
            except OSError:
                self._tell("folders")

    def _tell(self, what: str) -> None:
        with contextlib.suppress(OSError):
            self.control.sendall(TOLD[what])
        raise Tampered
