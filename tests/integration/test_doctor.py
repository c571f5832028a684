"""`turnlog doctor` against real servers: what it finds good, and what it says of each limit that is too low."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tests.contract.test_https import front, served
from tests.secured import Authority
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.roles.health import Health, serve_health
from turnlog.infra.roles.tls import serving
from turnlog.infra.run_folder import Endpoints, write_endpoints
from turnlog.settings import RegistrySettings, RunSettings, Settings
from turnlog.verbs import doctor
from turnlog.verbs.doctor import (
    GOOD,
    WORTH_A_LOOK,
    WRONG,
    DoctorFinding,
    broker_findings,
    check_servers,
    command,
)

ENOUGH = {
    "offsets.retention.minutes": "10080", "transaction.max.timeout.ms": "900000", "offset.metadata.max.bytes": "4096",
    "socket.request.max.bytes": "104857600", "group.min.session.timeout.ms": "6000",
    "group.max.session.timeout.ms": "1800000",
}  # fmt: skip


@pytest.mark.kafka
async def test_servers_of_ours_are_well_and_one_that_is_away_is_a_finding(
    live_settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(command, live_settings, as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    found = said["findings"]
    assert {finding["state"] for finding in found} <= {GOOD, WORTH_A_LOOK}
    good = {finding["what"].partition("=")[0] for finding in found if finding["state"] == GOOD}
    assert good >= {
        *ENOUGH,
        "compatibility BACKWARD_TRANSITIVE",
        "1 brokers, 1 copies of each topic (kafka.replication)",
    }
    for look in ("written", "overwritten"):
        assert f"an object that was {look} is read back and listed" in good
    assert "counts, replicas and limits match the catalogue" in good
    assert said["packages"]["aiokafka"] != "not installed"
    away = dataclasses.replace(live_settings, registry=RegistrySettings(url=f"http://{HOST}:{free_ports(1)[0]}"))
    more = dataclasses.replace(away, kafka=dataclasses.replace(away.kafka, replication=3, groups=5))
    gateway, [port] = Health("gateway"), free_ports(1)
    gateway.warn("chat_template", ["the chat template does not write tools"])
    write_endpoints(
        Path(more.run.directory),
        Endpoints(kafka="", registry="", store="", health={"gateway-0": f"http://{HOST}:{port}"}),
    )
    async with serve_health(gateway, (HOST, port)):
        told = await check_servers(more)
    assert DoctorFinding(WORTH_A_LOOK, "gateway-0", "the chat template does not write tools") in told
    wrong = [finding for finding in told if finding.state == WRONG]
    assert any(one.where.startswith("[registry] url") and "RegistryUnreachable" in one.what for one in wrong)
    assert any("1 brokers, 3 copies of each topic" in finding.what for finding in wrong)
    assert any("has 4 partitions, the settings ask for 5" in finding.what for finding in wrong)
    assert await asyncio.to_thread(command, more, as_json=False) == 1
    assert "what to change" in capsys.readouterr().out


@pytest.mark.kafka
async def test_registry_and_store_are_asked_as_roles_ask_them(live_settings: Settings, tmp_path: Path) -> None:
    authority, asked = Authority(tmp_path), list[str]()

    async def registry(request: Request) -> Response:
        if request.headers.get("authorization") != "Basic YWRhOnA=":
            return PlainTextResponse("who are you?", 401)
        asked.append(request.url.path)
        real = await http.get(request.url.path)
        return Response(real.content, real.status_code)

    ca, login = str(authority.file), {"username": "ada", "password": "p", "subject_prefix": "team-a."}
    async with (
        httpx.AsyncClient(base_url=live_settings.registry.url) as http,
        served(registry, tls=serving(str(authority.issue("registry")), "", "registry")) as registry_url,
        front(live_settings.store.endpoint, authority.issue("store")) as store_url,
    ):
        settings = dataclasses.replace(
            live_settings,
            registry=RegistrySettings(url=registry_url, ca_file=ca, **login),
            store=dataclasses.replace(live_settings.store, endpoint=store_url, ca_file=ca),
        )
        found = await check_servers(settings)
        assert [finding for finding in found if finding.state == WRONG] == []
        assert {f"registry {registry_url}", f"store {store_url}"} <= {one.where for one in found if one.state == GOOD}
        assert {"/config", "/config/team-a.TurnCompleted"} <= set(asked)
        stranger = dataclasses.replace(settings.registry, password="guess")
        found = await check_servers(dataclasses.replace(settings, registry=stranger))
        (wrong,) = [one for one in found if one.state == WRONG and "RegistryRefused" in one.what]
        assert "check [registry] username and password" in wrong.what


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("offsets.retention.minutes", "10079", "at least 10080: run.longest_pause_s is 604800 s"),
        ("transaction.max.timeout.ms", "1000", "a broker refuses longer transactions"),
        ("socket.request.max.bytes", "1048576", "the largest record is one request"),
        ("offset.metadata.max.bytes", "1000", "at least 4096"),
        ("group.min.session.timeout.ms", "10000", "at most 6000"),
        ("group.max.session.timeout.ms", "5000", "at least 6000"),
    ],
)
def test_a_limit_that_is_too_low_is_named_with_the_bound_and_the_reason(key: str, value: str, why: str) -> None:
    assert {finding.state for finding in broker_findings("broker 1", ENOUGH, Settings())} == {GOOD}
    (wrong,) = [one for one in broker_findings("broker 1", ENOUGH | {key: value}, Settings()) if one.state != GOOD]
    assert (wrong.state, wrong.where, wrong.remedy) == (WRONG, "broker 1", f"set {key} on every broker")
    assert f"{key}={value}, it must be" in wrong.what
    assert why in wrong.what


def test_what_a_broker_does_not_tell_is_worth_a_look_and_a_longer_pause_asks_for_more() -> None:
    hidden = {key: value for key, value in ENOUGH.items() if key != "offsets.retention.minutes"}
    assert [one.state for one in broker_findings("b", hidden, Settings())].count(WORTH_A_LOOK) == 1
    month = Settings(run=RunSettings(longest_pause_s=30 * 86400))
    assert [one.state for one in broker_findings("b", ENOUGH, month)].count(WRONG) == 1


@pytest.mark.parametrize(("apart", "state"), [(0, GOOD), (60, WRONG), (-60, WRONG), (None, WORTH_A_LOOK)])
def test_a_clock_that_is_apart_is_told_by_the_date_of_an_answer(apart: int | None, state: str) -> None:
    said = None if apart is None else format_datetime(datetime.now(UTC) + timedelta(seconds=apart), usegmt=True)
    assert doctor.skew("store", "http://s", said).state == state


@pytest.mark.parametrize(("level", "state"), [("FULL_TRANSITIVE", GOOD), ("BACKWARD", WRONG), ("NONE", WRONG)])
def test_a_weaker_compatibility_is_wrong_and_the_call_that_mends_it_is_said(level: str, state: str) -> None:
    found = doctor.level_of("http://r", "TurnCompleted", httpx.Response(200, json={"compatibilityLevel": level}))
    assert found.state == state
    assert state == GOOD or "PUT http://r/config/TurnCompleted" in found.remedy
