"""System calls that the host process of a guest has no use for once it runs: programs, connections, signals to others.

What is left to a guest that breaks out of wasmtime are files that the slot's user may read, and its own folders.
"""

from __future__ import annotations

import ctypes
import os

from turnlog.sandbox_workers.inside.child import prctl

PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
INSTRUCTION_BYTES = 8
"""struct sock_filter of linux/filter.h."""
DENIED = (
    "execve", "execveat", "fork", "vfork", "connect", "bind", "listen", "accept", "accept4", "sendto", "sendmsg",
    "sendmmsg", "recvmsg", "recvmmsg", "kill", "tkill", "pidfd_open", "pidfd_send_signal", "rt_sigqueueinfo",
    "setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups", "memfd_secret",
)  # fmt: skip
"""Beside what backends.seccomp denies to every sandbox."""


class _Program(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def load(program: bytes) -> None:
    """Put a BPF program on this thread and those that it starts, for good (seccomp(2)). Raises OSError."""
    buffer = ctypes.create_string_buffer(program, len(program))
    about = _Program(len(program) // INSTRUCTION_BYTES, ctypes.addressof(buffer))
    if prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(about), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
