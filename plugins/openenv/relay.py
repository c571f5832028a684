"""Program that runs beside an environment's server in a sandbox, and connects it with the worker outside.

A sandbox has no way in. It has one way out: the socket on which the worker accepts. The relay keeps some connections
open there; when the worker speaks on one, it is connected with the server. This text is sent into the sandbox, so it is
standard library only and imports nothing of turnlog. Its settings are a JSON object in the variable RELAY."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import json
import os
import pwd
import sys
from typing import Any

PART = 1 << 16


class Relay:
    """The connections between worker and server."""

    def __init__(self, outside: tuple[str, int], port: int, spare: int) -> None:
        self.outside, self.port, self.spare = outside, port, spare
        self.tasks: set[asyncio.Task[None]] = set()

    def add(self) -> None:
        """Open one more connection to the worker."""
        task = asyncio.create_task(self.tunnel())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def tunnel(self) -> None:
        """Wait for the worker's first bytes on a connection of its own, then connect it with the server."""
        reader, writer = await asyncio.open_connection(*self.outside)
        first = await reader.read(PART)
        self.add()
        try:
            if first:
                theirs, to_server = await asyncio.open_connection("127.0.0.1", self.port)
                to_server.write(first)
                await asyncio.gather(self.pass_on(reader, to_server), self.pass_on(theirs, writer))
        except OSError:  # the server does not listen, or one of the two is gone
            pass
        finally:
            writer.close()

    async def pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Copy bytes until one side ends."""
        try:
            while part := await source.read(PART):
                target.write(part)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()


def identity(named: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the user and groups of a process of USER[:GROUP], by name or number, and its HOME. Raises KeyError."""
    if not named:
        return {}, {}
    user, _, group = named.partition(":")
    entry = None
    with contextlib.suppress(KeyError):
        entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    if entry is None and not user.isdecimal():
        raise KeyError(f"the image has no user {user!r}")
    uid, gid = (entry.pw_uid, entry.pw_gid) if entry else (int(user), 0)
    more = os.getgrouplist(entry.pw_name, gid) if entry and not group else []
    if group:
        gid = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    return {"user": uid, "group": gid, "extra_groups": more}, {"HOME": entry.pw_dir if entry else "/"}


async def main(settings: dict[str, Any]) -> int:
    """Start the server and relay until it ends; return its exit status."""
    who, home = identity(settings["user"])
    server = await asyncio.create_subprocess_exec(
        *settings["command"],
        env={**os.environ, **home, **settings["env"]},
        cwd=settings["cwd"] or None,
        **who,
    )
    relay = Relay(tuple(settings["outside"]), settings["port"], settings["spare"])
    for _ in range(relay.spare):
        relay.add()
    code = await server.wait()
    for task in relay.tasks:
        task.cancel()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    given = json.loads(os.environ.pop("RELAY"))
    try:
        sys.exit(asyncio.run(main(given)))
    except (OSError, KeyError) as failed:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"the server cannot be started: {failed}\n")
        sys.exit(127)
