"""System calls that a sandbox has no use for, denied by a BPF program that bubblewrap loads.

The program is built with pyseccomp over the system's libseccomp. Where either is missing there is no filter, which is
logged once, and only namespaces, users and limits protect. Source of the list: what Docker's and containerd's default
profiles deny to a container without capabilities, and interfaces that they allow but that are of no use to a tool call.

A call by another architecture's table (int 0x80, x32) ends the process with SIGSYS: libseccomp's answer to an
architecture that a filter does not name. A call that this libseccomp has no name for returns ENOSYS, so that calls of a
newer kernel are not open before somebody has looked at them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

DENIED = (
    # other processes
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp", "pidfd_getfd",
    # mounts and roots
    "mount", "umount", "umount2", "pivot_root", "chroot", "fsopen", "fsmount", "fsconfig", "fspick", "move_mount",
    "open_tree", "mount_setattr", "statmount", "listmount", "sysfs", "ustat", "quotactl", "quotactl_fd",
    "open_by_handle_at", "name_to_handle_at", "swapon", "swapoff", "acct", "nfsservctl", "fanotify_init",
    # namespaces, keys, programs in the kernel
    "unshare", "setns", "add_key", "request_key", "keyctl", "bpf", "perf_event_open", "userfaultfd",
    "io_uring_setup", "io_uring_enter", "io_uring_register",
    # the machine
    "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "create_module", "query_module",
    "get_kernel_syms", "reboot", "syslog", "iopl", "ioperm", "modify_ldt", "vm86", "vm86old", "uselib", "_sysctl",
    "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "stime", "sethostname", "setdomainname",
    "personality", "vhangup", "lookup_dcookie",
    # objects that would outlive a call, and memory policy of the machine
    "mq_open", "mq_unlink", "shmget", "shmat", "semget", "semtimedop", "msgget", "move_pages", "migrate_pages", "mbind",
    "set_mempolicy", "set_mempolicy_home_node", "get_mempolicy",
    # a resource with one limit for the whole machine (fs.aio-max-nr)
    "io_setup",
)  # fmt: skip
MAKING = frozenset({"mount", "clone"})
"""Calls by which a zygote makes sandboxes."""
NEW_NAMESPACES = (0x00000080, 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET of clone(2)."""
TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI types into the terminal of whoever started us (CVE-2017-5226); TIOCLINUX pastes into the console."""
FILE_COMMANDS = (10, 1024, 1026)
"""F_SETSIG, F_SETLEASE, F_NOTIFY of fcntl(2). With them a signal of one's choice wakes or kills a stopped process
between calls, and a lease makes the next opener of a file wait for 45 s, where files of the interpreter are shared by
all sandboxes."""
FAMILIES = frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK})
"""Families of socket(2) and socketpair(2) that are allowed. All others (packet, vsock, alg, bluetooth, can, tipc, xdp
...) are kernel code that nobody needs here. Of netlink only NETLINK_ROUTE is allowed, which getifaddrs(3) asks for the
interfaces."""
NETLINK_ROUTE = 0
PROTOCOLS = frozenset({0, socket.IPPROTO_TCP, socket.IPPROTO_UDP})
"""Protocols of the internet families that are allowed. All others (SCTP, DCCP, MPTCP, UDP-Lite ...) are kernel code,
buffers and modules of their own."""
LAST_PROTOCOL = 18
"""All protocols from this number on are refused by one rule."""
LAST_FAMILY = 64
"""All families from this number on are refused by one rule; kernels know 46."""
BINARY_TREE = 2
"""Value of SCMP_FLTATR_CTL_OPTIMIZE for a binary tree: when a filter is installed, the kernel walks it for every
existing call."""
LAST_CALL = 1024
"""Upper bound of the call numbers examined; kernels are at about 470."""


@cache
def layers() -> tuple[bytes, bytes] | None:
    """Return the filter in two layers: one that a zygote has already, and one that only its inits can have, after their
    mounts. The split means that each reset installs only a small filter."""
    first, second = program(left_out=MAKING), program(left_out=MAKING, inverted=True)
    return None if first is None or second is None else (first, second)


@cache
def program(
    more: tuple[str, ...] = (), *, left_out: frozenset[str] = frozenset(), inverted: bool = False
) -> bytes | None:
    """Return the filter as BPF, or None (with one warning) if it cannot be built here. `more` has names of further
    calls to deny. `left_out` has names that the filter leaves out or, if `inverted`, the only ones that it contains."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        log.warning("no seccomp filter for sandboxes: %s; install turnlog[embedded] and libseccomp", error)
        return None
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # libseccomp before 2.5 lacks the attribute
        rules.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, BINARY_TREE)
    refuse = pyseccomp.ERRNO(errno.EPERM)
    for name in [name for name in (*DENIED, *more) if (name in left_out) == inverted]:
        try:
            rules.add_rule(refuse, name)
        except (OSError, RuntimeError, ValueError) as error:  # this libseccomp or this machine has no such call
            log.debug("seccomp: %s: %s", name, error)
    for flag in NEW_NAMESPACES if ("clone" in left_out) == inverted else ():
        rules.add_rule(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    if not inverted:
        _add_argument_rules(pyseccomp, rules)
        _unknown(pyseccomp, rules)
    return _export_program(rules)


def _add_argument_rules(pyseccomp: Any, rules: Any) -> None:
    """Add the rules that depend on arguments."""
    refuse = pyseccomp.ERRNO(errno.EPERM)
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags lie in memory; glibc falls back to clone
    # A call runs as the init's user, so it could lower the init's limits (prlimit(2)).
    init, given = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 0xFFFFFFFF, 1), pyseccomp.Arg(2, pyseccomp.NE, 0)
    rules.add_rule(refuse, "prlimit64", init, given)
    for request in TERMINAL_INPUT:
        rules.add_rule(refuse, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, request))
    for command in FILE_COMMANDS:
        rules.add_rule(refuse, "fcntl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, command))
    _sockets(pyseccomp, rules)


def _sockets(pyseccomp: Any, rules: Any) -> None:
    def equal(argument: int, value: int) -> Any:
        return pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, 0xFFFFFFFF, int(value))

    refuse, unserved = pyseccomp.ERRNO(errno.EAFNOSUPPORT), pyseccomp.ERRNO(errno.EPROTONOSUPPORT)
    for call in ("socket", "socketpair"):
        for family in set(range(LAST_FAMILY)) - FAMILIES:
            rules.add_rule(refuse, call, equal(0, family))
        rules.add_rule(refuse, call, pyseccomp.Arg(0, pyseccomp.GE, LAST_FAMILY))
        for family in (socket.AF_INET, socket.AF_INET6):
            for protocol in set(range(LAST_PROTOCOL)) - PROTOCOLS:
                rules.add_rule(unserved, call, equal(0, family), equal(2, protocol))
            rules.add_rule(unserved, call, equal(0, family), pyseccomp.Arg(2, pyseccomp.GE, LAST_PROTOCOL))
        netlink = equal(0, socket.AF_NETLINK)
        rules.add_rule(refuse, call, netlink, pyseccomp.Arg(2, pyseccomp.NE, NETLINK_ROUTE))


def _unknown(pyseccomp: Any, rules: Any) -> None:
    for number in range(LAST_CALL):
        try:
            pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, number)
        except ValueError:
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # numbers that this machine leaves out
                rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), number)


def _export_program(rules: Any) -> bytes:
    number = os.memfd_create("seccomp")
    with os.fdopen(number, "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def descriptor(content: bytes) -> int:
    """Return a new descriptor of these bytes, at their start, since each bwrap reads its own. The caller closes it."""
    number = os.memfd_create("bwrap")
    os.write(number, content)
    os.lseek(number, 0, os.SEEK_SET)
    return number
