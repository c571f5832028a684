"""System calls that a sandbox has no use for, denied by a BPF program that bubblewrap loads.

Built with pyseccomp over the system's libseccomp; where either is missing there is no filter, said once in the log,
and namespaces, users and limits hold alone. Source of the list: what container runtimes deny by default.
"""

from __future__ import annotations

import errno
import logging
import os
from functools import cache

log = logging.getLogger(__name__)

DENIED = (
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd",
    "mount", "umount2", "pivot_root", "chroot", "fsopen", "fsmount", "fsconfig", "fspick", "move_mount", "open_tree",
    "mount_setattr", "unshare", "setns", "add_key", "request_key", "keyctl", "bpf", "perf_event_open",
    "userfaultfd", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot",
    "swapon", "swapoff", "acct", "quotactl", "syslog", "iopl", "ioperm", "settimeofday", "clock_settime", "adjtimex",
    "clock_adjtime", "sethostname", "setdomainname", "open_by_handle_at", "name_to_handle_at", "personality",
    "io_uring_setup", "io_uring_enter", "io_uring_register", "mq_open", "shmget", "semget", "msgget", "vhangup",
    "move_pages", "mbind", "set_mempolicy", "migrate_pages", "lookup_dcookie", "fanotify_init",
)  # fmt: skip
NEW_NAMESPACES = (0x00000080, 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET of clone(2)."""
TIOCSTI = 0x5412
"""Types into the terminal of whoever started us (CVE-2017-5226)."""


@cache
def program() -> bytes | None:
    """The filter as BPF, for `bwrap --seccomp`; None (and one warning) when it cannot be built here."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        log.warning("no seccomp filter for sandboxes: %s; install turnlog[embedded] and libseccomp", error)
        return None
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    refuse = pyseccomp.ERRNO(errno.EPERM)
    for name in DENIED:
        try:
            rules.add_rule(refuse, name)
        except (OSError, RuntimeError, ValueError) as error:  # this libseccomp does not know the call
            log.debug("seccomp: %s: %s", name, error)
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags lie in memory; glibc falls back to clone
    for flag in NEW_NAMESPACES:
        rules.add_rule(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    rules.add_rule(refuse, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, TIOCSTI))
    return _exported(rules)


def _exported(rules: object) -> bytes:
    descriptor = os.memfd_create("seccomp")
    with os.fdopen(descriptor, "w+b") as file:
        rules.export_bpf(file)  # type: ignore[attr-defined]
        file.seek(0)
        return file.read()


def descriptor(program: bytes) -> int:
    """A fresh descriptor of the program, at its start: each bwrap reads its own. The caller closes it."""
    number = os.memfd_create("seccomp")
    os.write(number, program)
    os.lseek(number, 0, os.SEEK_SET)
    return number
