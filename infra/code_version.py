"""Versions of installed packages, as the log records them: the release and, where it is known, the git commit.

A version looks like 0.2.0, 0.2.0+g1a2b3c4d5e6f or 0.2.0+g1a2b3c4d5e6f.dirty (tracked files were changed after the
commit). Where a package came from is in its direct_url.json:
https://packaging.python.org/en/latest/specifications/direct-url
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

from turnlog import __version__

COMMIT_DIGITS = 12
GIT_S = 10.0
"""Maximum seconds for git to describe a checkout; after that no commit is recorded."""


@cache
def code_version() -> str:
    """Return the version of turnlog that this process runs. The first call starts git if turnlog is a checkout."""
    try:
        return package_version(distribution("turnlog"))
    except PackageNotFoundError:  # a source tree on PYTHONPATH, which nothing installed
        return __version__


def package_version(package: Distribution) -> str:
    """Return the version of a package with its commit, if it was installed from a repository or is a checkout."""
    try:
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        commit = str(origin.get("vcs_info", {}).get("commit_id", ""))[:COMMIT_DIGITS]
        url = urlsplit(str(origin.get("url", "")))
        editable = url.scheme == "file" and origin.get("dir_info", {}).get("editable", False)
    except (ValueError, AttributeError):  # written by another installer: its release is still known
        return package.version
    if not commit and editable:
        commit = _checkout(unquote(url.path))
    return f"{package.version}+g{commit}" if commit else package.version


@cache
def _checkout(folder: str) -> str:
    """Return the commit of a checkout, with `.dirty` if tracked files differ from it; "" if git does not tell."""
    command = [
        "git",
        "-C",
        folder,
        "describe",
        "--always",
        "--dirty=.dirty",
        f"--abbrev={COMMIT_DIGITS}",
        "--exclude=*",
    ]
    # Git's own variables, such as those of a hook that started this process, would name another repository, and so
    # would one further up that only happens to contain the folder.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    variables |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_CEILING_DIRECTORIES": os.path.dirname(os.path.realpath(folder))}
    try:
        done = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=GIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
