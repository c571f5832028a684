"""What a call can change of its sandbox and may not: the init's own limits, since prlimit(2) works between processes of
one user, and the writable folders themselves. Found changed, the sandbox is over, and the worker is told what it was,
so that nobody else is held to account."""

from __future__ import annotations

import contextlib
import os
import resource
import stat

from turnlog.sandbox_workers.inside.frames import Control, ControlClosed, frame
from turnlog.sandbox_workers.inside.processes import Place

LIMITS = range(16)
"""Every RLIMIT_ of Linux."""
TOLD = {what: frame({"changed": what}) for what in ("limits", "folders")}
"""Made beforehand: with its limits lowered, an init may be unable to."""


class Tampered(ControlClosed):
    """The worker has been told; nothing more is served."""


class Integrity:
    """As it was when the init began to serve."""

    def __init__(self, place: Place, control: Control) -> None:
        self.place = place
        self.control = control
        self.limits = [resource.getrlimit(number) for number in LIMITS]
        self.folders = [os.stat(folder) for folder in place.folders]

    def check(self) -> None:
        """Needs no descriptor and no memory to speak of. Raises Tampered."""
        if [resource.getrlimit(number) for number in LIMITS] != self.limits:
            self._tell("limits")

    def settle(self) -> None:
        """After a call, when nothing of it runs: its folders are there, with their own rights. Who owns a folder may
        take every right to it away, and has it so again in no later call. Raises Tampered."""
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
