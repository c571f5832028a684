"""`turnlog fold`: the comparison of policies as people read it, as JSON, or as a drawing of one session."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from rich.table import Table

from turnlog.consumers.fold.arguments import ARCHIVE
from turnlog.consumers.fold.comparison import Comparison, Row, Scope, Tally, compare
from turnlog.consumers.replay.progress import Shown
from turnlog.infra.roles.role import opened
from turnlog.infra.roles.terminal import Terminal, say_json
from turnlog.processors.core.fold.render import render, sizes
from turnlog.schemas.events import SegmentSample, TurnTreeAssembled
from turnlog.settings import Settings


def show(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the comparison; 0. Raises what `compare` raises."""
    return asyncio.run(_show(settings, arguments, Terminal()))


async def _show(settings: Settings, arguments: argparse.Namespace, console: Terminal) -> int:
    names = [arguments.policy, arguments.against] if arguments.against else [arguments.policy]
    session = arguments.show or arguments.session
    scope = Scope(group=arguments.group, session=session, top=max(arguments.top, 0), draw=bool(arguments.show))
    async with opened("fold", settings, archive=arguments.source == ARCHIVE) as role:
        with Shown(Terminal(stderr=True)) as progress:
            found = await compare(role, names, scope, threshold=arguments.fork_threshold, progress=progress)
    if arguments.json:
        say_json(found.body(), indent=1)
        return 0
    if arguments.show:
        console.print(*drawings(found).split("\n"), sep="\n", highlight=False, soft_wrap=True)
    console.print(totals(found))
    if not arguments.show and (rows := listed(found)):
        console.print(sessions(found, rows))
    elif not arguments.show and arguments.against:
        console.print("every session comes out the same")
    if found.open_groups:
        console.print(f"{found.open_groups:,} groups have not settled, or lack records; not every session is counted")
    if found.refused:
        console.print(f"{found.refused:,} records were refused; the sessions that name them train nothing")
    return 0


def totals(found: Comparison) -> Table:
    """One line per figure, one column per policy, and the difference of two."""
    shown = Table(title=f"{found.sessions:,} session{'' if found.sessions == 1 else 's'}")
    shown.add_column("tokens")
    for name in found.policies:
        shown.add_column(name, justify="right")
    two = len(found.policies) == 2
    if two:
        shown.add_column("difference", justify="right")
    reasons = sorted({reason for tally in found.totals for reason in tally.masked})
    lines = [
        ("segments (rows)", [tally.segments for tally in found.totals]),
        ("sampled", [tally.sampled for tally in found.totals]),
        ("trained", [tally.trained for tally in found.totals]),
        *((f"masked: {reason}", [tally.masked[reason] for tally in found.totals]) for reason in reasons),
        ("context computed again", [tally.duplicated for tally in found.totals]),
        ("in all rows", [tally.tokens for tally in found.totals]),
    ]
    for label, counts in lines:
        change = [f"{counts[1] - counts[0]:+,}" if counts[1] != counts[0] else "="] if two else []
        shown.add_row(label, *(f"{count:,}" for count in counts), *change)
    return shown


def listed(found: Comparison) -> list[Row]:
    """The sessions worth a line: under two policies, those that come out otherwise."""
    return [row for row in found.rows if len(row.by_policy) < 2 or row.by_policy[0] != row.by_policy[1]]


def sessions(found: Comparison, rows: Sequence[Row]) -> Table:
    """The sessions that differ most, two lines under two policies."""
    shown = Table(title="sessions that differ most" if len(found.policies) == 2 else "sessions")
    for name in ("session", "turns", "policy", "segments", "trained", "masked", "context again"):
        shown.add_column(name, justify="left" if name in ("session", "policy", "masked") else "right")
    for row in rows:
        for index, (policy, tally) in enumerate(zip(found.policies, row.by_policy, strict=True)):
            about = (row.session_id, str(row.turns)) if index == 0 else ("", "")
            shown.add_row(
                *about, policy, str(tally.segments), f"{tally.trained:,}", _masked(tally), f"{tally.duplicated:,}",
                end_section=index == len(row.by_policy) - 1,
            )  # fmt: skip
    return shown


def drawings(found: Comparison) -> str:
    """One picture per policy (processors/core/fold/render.py), tokens as numbers."""
    pictures = []
    for policy, outputs in zip(found.policies, found.outputs, strict=True):
        trees = [output for output in outputs if isinstance(output, TurnTreeAssembled)]
        samples = [output for output in outputs if isinstance(output, SegmentSample)]
        pictures.append(f"{policy}\n{render(trees, samples, sizes, gap=' ')}\n")
    return "\n".join(pictures)


def _masked(tally: Tally) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(tally.masked.items()))
