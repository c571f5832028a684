"""Calls' bytes pass through the init, and a `python` call is a fork of it: nothing of an earlier call may be left in
what it has freed.

So the init runs on the C library's allocator, which overwrites what is freed (M_PERTURB of mallopt(3)), without the
cache of freed blocks that evades that (glibc.malloc.tcache_count of the GNU C library's tunables), and without Python's
own allocator, which overwrites nothing. A child stops overwriting, since it forgets by ending.
"""

from __future__ import annotations

import ctypes
import os

FORGETFUL = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0"}
"""Environment that the init is to be started with; it takes it away before a call runs."""
M_PERTURB = -6
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)


def begin() -> None:
    """Take the variables away."""
    for name in FORGETFUL:
        os.environ.pop(name, None)


def stop() -> None:
    """In a child: what it frees from now on is its own."""
    if _mallopt is not None:
        _mallopt(M_PERTURB, 0)
