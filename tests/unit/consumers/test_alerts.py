"""Alarms reach people once, by a real HTTP server as apprise's target, and addresses are told to nobody."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.plugins.alarms import FAILED, Alarm
from turnlog.plugins.exporters import BadOutlet
from turnlog.plugins.exporters.alerts import PLACE, AlertCollector, Told, targets
from turnlog.schemas.events import RoleFailed
from turnlog.settings import AlertsSettings, RunSettings, Settings

pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # apprise imports it
SECRET = "s3cret-pass"


class Hook:
    """What was posted to it."""

    def __init__(self) -> None:
        self.port = 0
        self.status = 200
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"json://user:{SECRET}@127.0.0.1:{self.port}/hook"


@contextmanager
def listening() -> Iterator[Hook]:
    hook = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if hook.status == 200:
                hook.bodies.append(body)
            self.send_response(hook.status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hook.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hook
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hook() -> Iterator[Hook]:
    with listening() as hook:
        yield hook


def alarm(name: str) -> Alarm:
    return Alarm(name, f"{name} is wrong", "/x", FAILED)


def test_an_alarm_is_told_once_while_it_goes_on_and_again_when_it_comes_back() -> None:
    told = Told(100.0)

    def told_at(now: float, *names: str) -> list[str]:
        news = [one.name for one in told.news(map(alarm, names), now)]
        told.at |= dict.fromkeys(news, now)
        return news

    assert told_at(0, "a", "b") == ["a", "b"]
    assert told_at(50, "a", "b", "c") == ["c"]
    assert told_at(60, "b") == []
    assert told_at(70, "a", "b") == ["a"]
    assert told_at(101, "a", "b") == ["b"]


def settings_of(tmp_path: Path, *hooks: Hook, **more: Any) -> Settings:
    urls = " ".join(hook.url for hook in hooks)
    return Settings(run=RunSettings(id="run", directory=str(tmp_path)), alerts=AlertsSettings(urls=urls, **more))


@pytest.fixture
async def role(tmp_path: Path, hook: Hook) -> AsyncIterator[Role]:
    log = MemoryLog(MemoryBroker(time.time_ns() // 10**6))  # failures are as old as their records say
    settings = settings_of(tmp_path, hook)
    await apply(log, settings)
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        yield Role("alerts", "alerts-0", settings, log, events, MemoryBlobs(), Health("alerts"))


async def test_a_role_whose_restarts_do_not_help_is_told_of_in_words_and_where_to_look(role: Role, hook: Hook) -> None:
    (target,) = targets(role.settings)
    async with role.log.reader() as failures:
        failures.assign({PLACE: 0})
        watch = AlertCollector(role)
        assert await watch.look(failures) == []
        await role.events.append(
            RoleFailed(
                event_id="e", run_id="run", role="trainer-0", cause="ended with status 1", remedy="run_restarted",
                restart=1, host="node",
            )
        )  # fmt: skip
        for now in (1e9, 1e9 + 1):
            target.tell("run", await watch.look(failures), now)
    (body,) = hook.bodies
    assert body["title"] == "turnlog run run"
    assert "trainer-0 on node failed, the run was restarted: ended with status 1" in body["message"]
    assert "docs/operations.md: Settings and start, restarts of a role do not help" in body["message"]


def test_what_an_address_does_not_take_it_is_told_later_others_at_once_and_no_log_line_holds_an_address(
    tmp_path: Path, hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with listening() as broken:
        broken.status = 503
        found = targets(settings_of(tmp_path, broken, hook))
        for now in (0.0, 1.0):
            for target in found:
                target.tell("run", [alarm("a")], now)
        broken.status = 200
        found[0].tell("run", [alarm("a")], 2.0)
        assert [len(hook.bodies), len(broken.bodies)] == [1, 1]
        assert "address 1 of [alerts] urls did not accept an alert" in caplog.text
        assert SECRET not in caplog.text
        assert str(broken.port) not in caplog.text


@pytest.mark.parametrize(("urls", "why"), [(f"nothing://{SECRET}", "address 1 of"), ("", "is empty")])
def test_an_address_that_apprise_does_not_know_is_refused_by_its_place(tmp_path: Path, urls: str, why: str) -> None:
    settings = dataclasses.replace(settings_of(tmp_path), alerts=AlertsSettings(urls=urls))
    with pytest.raises(BadOutlet, match=why) as refused:
        targets(settings)
    assert SECRET not in str(refused.value)
