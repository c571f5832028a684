"""First process of a sandbox: runs one call at a time from a unix socket, and no process outlives its call.

Standard library only, since this folder is all of turnlog that a sandbox holds. `python` calls fork this warm
interpreter; `shell` calls fork and exec. Under bubblewrap it is pid 1 of its own pid namespace, so that
kill(-1) ends every other process at once (pid_namespaces(7)); elsewhere it adopts orphans (PR_SET_CHILD_SUBREAPER)
and kills its descendants. Control socket closed: everything dies.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys

# Imported for the calls: what agents' code asks for most is warm.
import collections, datetime, decimal, fractions, functools, itertools, json, math, re, statistics, string  # isort: skip # noqa: E401, F401

from turnlog.sandbox_workers.inside.call import Call
from turnlog.sandbox_workers.inside.child import PR_SET_DUMPABLE, prctl
from turnlog.sandbox_workers.inside.frames import ControlClosed, receive, send
from turnlog.sandbox_workers.inside.processes import Place
from turnlog.sandbox_workers.inside.wipe import fingerprint, wipe

PR_SET_CHILD_SUBREAPER = 36


def serve(control: socket.socket, place: Place) -> None:
    """Answer frames until the worker is gone."""
    as_new = fingerprint()
    send(control, {"ready": True, "pid": os.getpid()})
    while True:
        head, body = receive(control)
        if head["op"] == "exec":
            send(control, *Call(place, control, head, body).run())
        elif head["op"] == "reset":
            send(control, {"clean": wipe(place, as_new)})


def main(control: str, namespace: str, own_user: str, *folders: str) -> None:
    """Command line: control socket's descriptor, "namespace" or "plain", "own" or "shared" user, writable folders."""
    place = Place(list(folders), own_user == "own", namespace == "namespace")
    if place.namespace != (os.getpid() == 1):
        raise SystemExit("a sandbox's init must be pid 1 exactly when it has a pid namespace")
    if any(os.stat(folder).st_uid != os.getuid() for folder in folders):
        raise SystemExit(f"{', '.join(folders)}: a reset empties these, and they belong to somebody else")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # pid 1 is immune to every signal that it does not handle
    if prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):  # so that no call can write to our memory through /proc/1/mem
        raise SystemExit("prctl(PR_SET_DUMPABLE) failed")
    if not place.namespace and prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("prctl(PR_SET_CHILD_SUBREAPER) failed")
    if (own := os.environ.pop("PYTHONPATH", "")) in sys.path:
        sys.path.remove(own)
    gc.collect()
    gc.freeze()  # forked children share these pages instead of copying them
    gc.disable()
    with socket.socket(fileno=int(control)) as worker, contextlib.suppress(ControlClosed):
        worker.set_inheritable(False)
        serve(worker, place)


if __name__ == "__main__":
    main(*sys.argv[1:])
