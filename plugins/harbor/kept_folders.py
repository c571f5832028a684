"""Folders that a task's own texts name: they are kept for its tests beside the working directory.

A path in an instruction or in a file of the tests keeps the folder that it lies in. A folder of the system is never
kept, and a path directly below / keeps nothing, because it may be a file's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

NAMED: Final = re.compile(r"(?<![\w./:~$}-])(/[\w.+-]+(?:/[\w.+-]+)+)")
"""An absolute path with a folder in it, which is no part of an address or of a longer path."""
SYSTEM: Final = frozenset({
    "bin", "boot", "dev", "lib", "lib32", "lib64", "libx32", "logs", "proc", "root", "run", "sbin", "solution", "sys",
    "tests", "usr",
})  # fmt: skip
"""Folders below / that are no task's own, or are kept or provided in any case."""
HIDDEN: Final = frozenset({"/etc", "/opt"})
"""Folders that bubblewrap fills itself."""
MOST: Final = 20
"""Maximum number of folders; those that are named most often come first."""
TEXT_BYTES: Final = 1 << 20


def named_folders(texts: Iterable[str], *, bubblewrap: bool) -> list[str]:
    """Return the folders of the paths in the texts, in alphabetical order."""
    found: Counter[str] = Counter()
    for text in texts:
        for path in NAMED.findall(text):
            parts = path[1:].rstrip("./").split("/")[:-1]
            if parts and parts[0] not in SYSTEM and not {".", ".."} & set(parts):
                found[f"/{'/'.join(parts)}"] += 1
    served = [path for path in found if not (bubblewrap and (path in HIDDEN or path.startswith("/etc/")))]
    return sorted(sorted(served, key=lambda path: (-found[path], path))[:MOST])


def texts_of(folder: Path) -> Iterator[str]:
    """Yield the instructions of a task folder and the texts of its tests."""
    places = [folder, *sorted((folder / "steps").glob("*"))]
    for place in places:
        for path in (place / "instruction.md", *sorted((place / "tests").rglob("*"))):
            if path.is_file() and path.stat().st_size <= TEXT_BYTES:
                content = path.read_bytes()
                if b"\0" not in content:
                    yield content.decode(errors="replace")
