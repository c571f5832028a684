"""Runs in a verifier's sandbox: prepares its folders before the tests, and reads what they wrote."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tarfile
from typing import Any

from turnlog.plugins.harbor.inside.unpacking import unpack

STAGED = "/logs/staged"
"""Folder whose content belongs below /."""
LAST_CHARS = 4000
MOST_CHARS = 16_000
MOST_FILES = 200
"""Maximum number of artifacts that are listed."""


def prepare(about: dict[str, Any]) -> None:
    """Restore the files that the tests look at, and empty the folder of the rewards. Prints `altered` if the snapshot
    of a step is not the one that was taken at its end, or has files elsewhere than in the kept folders."""
    snapshot, sha256 = about["snapshot"], about["sha256"]
    if snapshot:
        with open(snapshot, "rb") as file:
            if hashlib.sha256(file.read()).hexdigest() != sha256:
                sys.stdout.write("altered")
                return
        for folder in about["folders"]:
            empty(os.path.abspath(folder), but=("turnlog",))
        try:
            with tarfile.open(snapshot) as archive:
                unpack(archive, "/", [*about["folders"], "/logs"])
        except tarfile.TarError:
            sys.stdout.write("altered")
            return
    if os.path.isdir(STAGED):
        with contextlib.suppress(shutil.Error):  # what the verifier's own image has in a file's place stays
            shutil.copytree(STAGED, "/", symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(STAGED)
    shutil.rmtree("/logs/turnlog", ignore_errors=True)
    if os.path.islink("/logs/verifier"):
        os.unlink("/logs/verifier")
    shutil.rmtree("/logs/verifier", ignore_errors=True)
    for name in ("verifier", "agent", "artifacts"):
        os.makedirs(f"/logs/{name}", exist_ok=True)
        os.chmod(f"/logs/{name}", 0o777)
    sys.stdout.write("prepared")


def empty(folder: str, but: tuple[str, ...]) -> None:
    """Remove what is in a folder."""
    for entry in list(os.scandir(folder)) if os.path.isdir(folder) else []:
        if entry.name in but:
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


def report(about: dict[str, Any]) -> None:
    """Print as JSON what the tests wrote, and the artifacts."""
    found: dict[str, Any] = {
        "json": text("/logs/verifier/reward.json"),
        "txt": text("/logs/verifier/reward.txt"),
        "output": (text("/logs/verifier/test-stdout.txt", last=True) or "")[-LAST_CHARS:],
        "artifacts": artifacts(about["artifacts"]),
    }
    sys.stdout.write(json.dumps(found))


def text(path: str, *, last: bool = False) -> str | None:
    """Return the text of a plain file, at most MOST_CHARS of its beginning or end; None if there is none."""
    try:
        with open(path, "rb") as file:
            if last:
                file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_CHARS))
            return file.read(MOST_CHARS).decode(errors="replace")
    except OSError:
        return None


def artifacts(sources: list[str]) -> dict[str, Any]:
    """Return path -> size and sha256 of the files at or below the sources."""
    found: dict[str, Any] = {}
    for source in sources:
        paths = [source]
        if os.path.isdir(source):
            paths = [os.path.join(top, name) for top, _, names in os.walk(source) for name in sorted(names)]
        for path in paths:
            if len(found) < MOST_FILES and os.path.isfile(path) and not os.path.islink(path):
                digest = hashlib.sha256()
                with open(path, "rb") as file:
                    while part := file.read(1 << 20):
                        digest.update(part)
                found[path] = {"size": os.path.getsize(path), "sha256": digest.hexdigest()}
    return found


if __name__ == "__main__":
    {"prepare": prepare, "report": report}[sys.argv[1]](json.loads(sys.argv[2]))
