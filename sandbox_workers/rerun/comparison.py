"""Where an execution differs from the recorded one."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnlog.sandbox_workers.workspaces import Manifest
from turnlog.schemas.events import EgressRequest, ToolStatus

AROUND = 40
"""Bytes of an excerpt on either side of the first difference."""
NAMED = 10
"""Files named of a workspace that differs."""
MASK = b"\0"
"""Stands in both outputs where a pattern of --ignore did; no legal text looks like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a call came to, recorded or now."""

    status: ToolStatus
    reason: str
    exit_code: int | None
    output: bytes
    tree: Manifest | None
    """Of a durable workspace after the call; None: there is none, or nobody knows."""
    requests: tuple[EgressRequest, ...]
    environment_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as it was."""

    what: str
    """status | exit_code | output | workspace | requests | environment"""
    recorded: str
    now: str
    at: int | None = None
    """Of outputs: bytes that are alike, after masking."""

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def differences(then: Result, now: Result, ignored: Sequence[re.Pattern[bytes]] = ()) -> list[Difference]:
    """All of them, the most telling first. Raw bytes are compared, but for what `ignored` matches."""
    found = []
    if (then.status, then.reason) != (now.status, now.reason):
        found.append(Difference(what="status", recorded=_status(then), now=_status(now)))
    if then.exit_code != now.exit_code:
        found.append(Difference(what="exit_code", recorded=str(then.exit_code), now=str(now.exit_code)))
    found += _of_outputs(masked(then.output, ignored), masked(now.output, ignored))
    if then.tree is not None and now.tree is not None and then.tree.tree_sha256 != now.tree.tree_sha256:
        found.append(_of_trees(then.tree, now.tree))
    found += _of_requests(then.requests, now.requests)
    if then.environment_sha256 and now.environment_sha256 and then.environment_sha256 != now.environment_sha256:
        found.append(Difference(what="environment", recorded=then.environment_sha256, now=now.environment_sha256))
    return found


def masked(output: bytes, ignored: Iterable[re.Pattern[bytes]]) -> bytes:
    """Without what may differ."""
    for pattern in ignored:
        output = pattern.sub(lambda _: MASK, output)
    return output


def _status(result: Result) -> str:
    return result.status.value + (f" ({result.reason})" if result.reason else "")


def _of_outputs(then: bytes, now: bytes) -> list[Difference]:
    if then == now:
        return []
    at = next((place for place, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
    return [Difference(what="output", recorded=_excerpt(then, at), now=_excerpt(now, at), at=at)]


def _excerpt(output: bytes, at: int) -> str:
    """What stands around the first difference; "..." where more does."""
    first, last = max(0, at - AROUND), at + AROUND
    text = output[first:last].decode(errors="backslashreplace")
    return ("..." if first else "") + text + ("..." if last < len(output) else "")


def _of_trees(then: Manifest, now: Manifest) -> Difference:
    before, after = _entries(then), _entries(now)
    missing = [path for path in before if path not in after]
    more = [path for path in after if path not in before]
    changed = [path for path in before if path in after and before[path] != after[path]]
    both = _listed("another content or mode", changed)
    return Difference(
        what="workspace",
        recorded="; ".join(filter(None, (_listed("only then", missing), both))) or "no file more",
        now="; ".join(filter(None, (_listed("only now", more), both))) or "no file more",
    )


def _entries(tree: Manifest) -> Mapping[str, object]:
    return {
        stored.entry.path: (stored.entry.kind, stored.entry.mode, stored.entry.target, stored.sha256)
        for stored in tree.files
    }


def _listed(what: str, paths: Sequence[str]) -> str:
    if not paths:
        return ""
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    shown = ", ".join(path.encode(errors="surrogateescape").decode(errors="backslashreplace") for path in paths[:NAMED])
    return f"{what}: {shown}{more}"


def _of_requests(then: Iterable[EgressRequest], now: Iterable[EgressRequest]) -> list[Difference]:
    """What was asked and what came of it; not in which order, how long it took, or from where."""
    before, after = Counter(map(_asked, then)), Counter(map(_asked, now))
    if before == after:
        return []
    missing, more = list((before - after).elements()), list((after - before).elements())
    return [Difference(what="requests", recorded=_listed("only then", missing), now=_listed("only now", more))]


def _asked(one: EgressRequest) -> str:
    return f"{one.method} {one.url} -> {one.status} {one.response.sha256[:16] if one.response else one.reason}"
