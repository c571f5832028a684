"""An installed package that offers recipes or model families, made for one test: its metadata alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from turnlog.infra.environments import sources
from turnlog.names import EntryPointGroup


@contextlib.contextmanager
def offering(
    folder: Path,
    patched: pytest.MonkeyPatch,
    package: str,
    points: Mapping[str, str],
    group: EntryPointGroup = EntryPointGroup.RECIPES,
) -> Iterator[None]:
    """`points`: name of what is offered -> where it is, `module:NAME`."""
    info = folder / f"{package}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    told = "".join(f"{name} = {place}\n" for name, place in points.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{told}")
    patched.syspath_prepend(str(folder))
    sources.task_source.cache_clear()
    try:
        yield
    finally:
        sources.task_source.cache_clear()
