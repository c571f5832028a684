"""`turnlog sandbox [pool|check|exec]`: the role, or one of its three tools."""

from __future__ import annotations

import argparse
import asyncio

from turnlog.settings import Settings


def command(settings: Settings, arguments: argparse.Namespace) -> int:
    """Run one action; the exit status."""
    match arguments.action:
        case "pool":
            from turnlog.sandbox_workers.console.pool_table import show

            return show(settings, arguments)
        case "check":
            from turnlog.sandbox_workers.console.machine_check import show as show_check

            return asyncio.run(show_check(settings, as_json=arguments.json))
        case "exec":
            from turnlog.sandbox_workers.console.one_command import run

            return run(settings, arguments)
        case _:
            from turnlog.infra.role import serve
            from turnlog.sandbox_workers.worker import main

            return serve("sandbox", main, settings)
