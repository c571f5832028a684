"""First process of a sandbox: runs one call at a time from a unix socket, and no process outlives its call, but for the
persistent interpreter, which stands still between its calls.

Standard library only, since this folder is all of turnlog that a sandbox holds. `python` calls fork this warm
interpreter; `shell` and `program` calls fork and exec. Under bubblewrap it is pid 1 of its own pid namespace, so that
kill(-1) ends every other process at once (pid_namespaces(7)); elsewhere it adopts orphans (PR_SET_CHILD_SUBREAPER)
and kills its descendants. Control socket closed: everything dies.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys

# Imported for the calls: what agents' code asks for most is warm.
import collections, datetime, decimal, fractions, functools, itertools, json, math, re, statistics, string  # isort: skip # noqa: E401, F401

from turnlog.sandbox_workers.inside import forgetting
from turnlog.sandbox_workers.inside.child import PR_SET_DUMPABLE, prctl
from turnlog.sandbox_workers.inside.ending import Reaped, end_all
from turnlog.sandbox_workers.inside.frames import Control, ControlClosed, Socket, frame, send
from turnlog.sandbox_workers.inside.network import listener
from turnlog.sandbox_workers.inside.processes import Place
from turnlog.sandbox_workers.inside.service import Service

PR_SET_CHILD_SUBREAPER = 36


def main(control: str, *arguments: str) -> None:
    """Command line: control socket's descriptor, and see `run`."""
    run(Socket(int(control)), *arguments)


def run(control: Control, namespace: str, own_user: str, network: str, *folders: str) -> None:
    """Serve until the worker is gone. "namespace" or "plain", "own" or "shared" user, "none" or "allowlist", writable
    folders. With "allowlist" the worker gets a socket that listens on our loopback, and we keep none of it."""
    place = Place(list(folders), own_user == "own", namespace == "namespace")
    if place.namespace != (os.getpid() == 1):
        raise SystemExit("a sandbox's init must be pid 1 exactly when it has a pid namespace")
    if any(os.stat(folder).st_uid != os.getuid() for folder in folders):
        raise SystemExit(f"{', '.join(folders)}: a reset empties these, and they belong to somebody else")
    protect(place)
    freeze()
    serve(control, place, network)


def serve(control: Control, place: Place, network: str, *, forked: bool = False) -> None:
    """Say that we are there, then answer until the worker is gone. `forked`: by a zygote, and not to be used again."""
    with contextlib.suppress(ControlClosed):
        _ready(control, place, network)
        Service(control, place, lazily=forked).serve()
    end_all(place, Reaped())


def _ready(control: Control, place: Place, network: str) -> None:
    head = {"ready": True, "pid": os.getpid()}
    if network == "none":
        send(control, head)
    elif network == "allowlist" and isinstance(control, Socket):
        with listener(namespace=place.namespace) as proxy:
            control.pass_on(frame(head), proxy.fileno())
    else:
        raise SystemExit(f"network {network!r} cannot be served here")


def protect(place: Place) -> None:
    """Let no call change what we are."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # pid 1 is immune to every signal that it does not handle
    if prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):  # so that no call can write to our memory through /proc/1/mem
        raise SystemExit("prctl(PR_SET_DUMPABLE) failed")
    if not place.namespace and prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("prctl(PR_SET_CHILD_SUBREAPER) failed")
    forgetting.begin()
    if (own := os.environ.pop("PYTHONPATH", "")) in sys.path:
        sys.path.remove(own)


def freeze() -> None:
    """Forked children share these pages instead of copying them."""
    gc.collect()
    gc.freeze()
    gc.disable()


if __name__ == "__main__":
    main(*sys.argv[1:])
