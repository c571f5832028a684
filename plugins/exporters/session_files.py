"""Sessions as files in every format that `turnlog log session export` writes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from turnlog.consumers.index.reader import Index, SessionView
from turnlog.infra.roles.role import Role
from turnlog.plugins.dashboard.export import as_html, json_file
from turnlog.plugins.dashboard.records import Vocabulary, session_tokens
from turnlog.plugins.exporters.atif import atif_files
from turnlog.plugins.exporters.contexts import read_session
from turnlog.plugins.exporters.hub_traces import trace_files

ENDINGS: Final = {"html": "html", "json": "json", "atif": "json", "trace": "jsonl"}
"""Ending of files by format."""
Files = dict[str, bytes]
"""Contents by path, relative to the folder of the first file."""


async def session_files(
    role: Role, index: Index, view: SessionView, kind: str, file: str
) -> tuple[Files, Sequence[str]]:
    """Return the files of a session in the format `kind`, the first of which is named `file`, and notes on what is
    missing. Raises what `session_tokens` raises, and BlobMissing."""
    if kind in ("atif", "trace"):
        session = await read_session(role, index, view)
        write = atif_files if kind == "atif" else trace_files
        return await asyncio.to_thread(write, session, file), ()
    tokens = await session_tokens(role, index, view, _vocabulary(role.settings.model.path))
    write_one = as_html if kind == "html" else json_file
    return {file: write_one(view, tokens).encode()}, tokens.notes


@functools.lru_cache(maxsize=1)
def _vocabulary(folder: str) -> Vocabulary:
    """Return the vocabulary of a model, loaded once for all sessions of a run."""
    return Vocabulary(folder)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files below a folder. Raises OSError."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
