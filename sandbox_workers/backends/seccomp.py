"""System calls that a sandbox has no use for, denied by a BPF program that bubblewrap loads.

Built with pyseccomp over the system's libseccomp; where either is missing there is no filter, said once in the log,
and namespaces, users and limits hold alone. Source of the list: what Docker's and containerd's default profiles deny to
a container without capabilities, and the interfaces that are theirs to allow but of no use to a tool call.

A call by another architecture's table (int 0x80, x32) ends the process with SIGSYS: libseccomp's answer to an
architecture that a filter does not name. A call that this libseccomp has no name for is answered ENOSYS, so that what
a newer kernel brings is not open before somebody has looked at it.
"""

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
    # what would outlive a call, and memory policy of the machine
    "mq_open", "mq_unlink", "shmget", "shmat", "semget", "semtimedop", "msgget", "move_pages", "migrate_pages", "mbind",
    "set_mempolicy", "set_mempolicy_home_node", "get_mempolicy",
)  # fmt: skip
NEW_NAMESPACES = (0x00000080, 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET of clone(2)."""
TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI types into the terminal of whoever started us (CVE-2017-5226); TIOCLINUX pastes into the console."""
FAMILIES = frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK})
"""Of socket(2). All others (packet, vsock, alg, bluetooth, can, tipc, xdp ...) are kernel code that nobody needs here;
of netlink only NETLINK_ROUTE, which getifaddrs(3) asks for the interfaces."""
NETLINK_ROUTE = 0
LAST_FAMILY = 64
"""Kernels know 46; beyond this all are refused at once."""
LAST_CALL = 1024
"""Numbers up to here are looked at; kernels are at about 470."""


@cache
def program(more: tuple[str, ...] = ()) -> bytes | None:
    """The filter as BPF, for `bwrap --seccomp`; None (and one warning) when it cannot be built here. `more`: names of
    calls that are denied besides."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        log.warning("no seccomp filter for sandboxes: %s; install turnlog[embedded] and libseccomp", error)
        return None
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    refuse = pyseccomp.ERRNO(errno.EPERM)
    for name in (*DENIED, *more):
        try:
            rules.add_rule(refuse, name)
        except (OSError, RuntimeError, ValueError) as error:  # this libseccomp or this machine has no such call
            log.debug("seccomp: %s: %s", name, error)
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags lie in memory; glibc falls back to clone
    for flag in NEW_NAMESPACES:
        rules.add_rule(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    # A call runs as the init's user, so the init's limits would be its to lower (prlimit(2)).
    init, given = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 0xFFFFFFFF, 1), pyseccomp.Arg(2, pyseccomp.NE, 0)
    rules.add_rule(refuse, "prlimit64", init, given)
    for request in TERMINAL_INPUT:
        rules.add_rule(refuse, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, request))
    _sockets(pyseccomp, rules)
    _unknown(pyseccomp, rules)
    return _exported(rules)


def _sockets(pyseccomp: Any, rules: Any) -> None:
    refuse = pyseccomp.ERRNO(errno.EAFNOSUPPORT)
    for family in set(range(LAST_FAMILY)) - FAMILIES:
        rules.add_rule(refuse, "socket", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 0xFFFFFFFF, family))
    rules.add_rule(refuse, "socket", pyseccomp.Arg(0, pyseccomp.GE, LAST_FAMILY))
    rules.add_rule(
        refuse,
        "socket",
        pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 0xFFFFFFFF, int(socket.AF_NETLINK)),
        pyseccomp.Arg(2, pyseccomp.NE, NETLINK_ROUTE),
    )


def _unknown(pyseccomp: Any, rules: Any) -> None:
    for number in range(LAST_CALL):
        try:
            pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, number)
        except ValueError:
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # numbers that this machine leaves out
                rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), number)


def _exported(rules: Any) -> bytes:
    number = os.memfd_create("seccomp")
    with os.fdopen(number, "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def descriptor(content: bytes) -> int:
    """A fresh descriptor of these bytes, at their start: each bwrap reads its own. The caller closes it."""
    number = os.memfd_create("bwrap")
    os.write(number, content)
    os.lseek(number, 0, os.SEEK_SET)
    return number
