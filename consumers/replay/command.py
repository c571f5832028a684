"""`turnlog replay`: verify, or refold under other settings."""

from __future__ import annotations

import argparse

from turnlog.consumers.replay.refold import Changes, refold
from turnlog.consumers.replay.run import replay
from turnlog.consumers.replay.source import BadRefold
from turnlog.settings import Settings


async def command(settings: Settings, arguments: argparse.Namespace) -> int:
    """The exit status. Raises ReplayError and what the log, the store and the registry raise: status 2."""
    changes = Changes.of(arguments)
    if changes.none:
        if arguments.out is not None:
            raise BadRefold("--out is for a refold: say what changes, for example --policy, --estimator or --set")
        return await replay(
            settings, verify=arguments.verify, source=arguments.source, until=arguments.until, fresh=arguments.fresh
        )
    if arguments.verify:
        raise BadRefold("--verify compares what was recorded: leave the changes out")
    if arguments.out is None:
        raise BadRefold("a refold writes a dataset: say where with --out FOLDER")
    return await refold(
        settings, changes, arguments.out, format=arguments.format, source=arguments.source, until=arguments.until,
        fresh=arguments.fresh, overwrite=arguments.overwrite,
    )  # fmt: skip
