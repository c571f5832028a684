"""A gateway of a release that does not know players: during an upgrade, or after it was undone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from aiohttp import web

from turnlog.producers.agents import Attempt
from turnlog.producers.gateway_client import GatewayClient, GatewayFailed, OpenSession
from turnlog.producers.players import players_on_log
from turnlog.settings import GatewaySettings, RunSettings, Settings

STATE: dict[str, Any] = {
    "finished": False, "outcome": None, "reason": None, "turns": [], "messages": [], "last_turn": None, "epoch": "e",
}  # fmt: skip


async def test_no_game_is_played_at_it(tmp_path: Any) -> None:
    known: dict[str, Any] = {}

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(STATE | known)

    app = web.Application()
    app.router.add_get("/sessions/s", answer)
    served = web.AppRunner(app)
    await served.setup()
    site = web.TCPSite(served, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{served.addresses[0][1]}"
        settings = Settings(run=RunSettings(id="r", directory=str(tmp_path)), gateway=GatewaySettings(url=url))
        async with GatewayClient(settings) as client:
            attempt = object.__new__(Attempt)
            attempt.gateway, attempt.session = client, OpenSession("s", url, "t", "a")
            with pytest.raises(GatewayFailed, match="does not know players"):
                await players_on_log(attempt, None)
            known["players"] = []
            assert await players_on_log(attempt, None) == {}
            older = dataclasses.replace(await client.state(attempt.session), players=None)
            with pytest.raises(GatewayFailed, match="does not know players"):
                await players_on_log(attempt, older)
    finally:
        await served.cleanup()
