"""The Faust live views on real Kafka: restarts with a table to recover lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.roles.role import Role, open_role
from turnlog.names import ConsumerGroup
from turnlog.schemas import ids
from turnlog.schemas.events import (
    Agent,
    Environment,
    Expects,
    Outcome,
    Purpose,
    Sampling,
    SessionFinished,
    SessionStarted,
)
from turnlog.settings import Settings

LIVES = 4
SESSIONS = 100


def started(run_id: str, number: int) -> SessionStarted:
    session = ids.digest("session", run_id, number)
    return SessionStarted(
        event_id=ids.digest("SessionStarted", session),
        run_id=run_id,
        group_id=f"g{number}",
        session_id=session,
        floor=0,
        task_id="t",
        group_size=1,
        rollout_id=f"r{number}",
        rollout_index=0,
        attempt=0,
        purpose=Purpose.train,
        recipe="calc",
        agent=Agent("white-box", "1"),
        model="m",
        tokenizer_sha256="",
        chat_template_sha256="",
        sampling=Sampling(),
        environment=Environment(name="none", version="1"),
        writer_url="http://gateway",
    )


def finished(start: SessionStarted) -> SessionFinished:
    return SessionFinished(
        event_id=ids.digest("SessionFinished", start.session_id),
        run_id=start.run_id,
        group_id=start.group_id,
        session_id=start.session_id,
        floor=0,
        epoch=start.event_id,
        turns=(),
        undelivered=(),
        outcome=Outcome.completed,
        reason="",
        final=True,
        expects=Expects(False),
    )


async def write(role: Role, life: int) -> None:
    """Each life starts 100 sessions and ends those of the life before."""
    run_id = role.settings.run.id
    now = [started(run_id, number) for number in range(life * SESSIONS, (life + 1) * SESSIONS)]
    before = [started(run_id, number) for number in range((life - 1) * SESSIONS, life * SESSIONS)] if life else []
    events = [*now, *map(finished, before), *now[:5]]
    await asyncio.gather(*[role.events.append(event) for event in events])


async def seen(url: str, wanted: dict[str, int], worker: subprocess.Popen[bytes], *, within_s: float = 90) -> Any:
    async with httpx.AsyncClient(base_url=url, timeout=2) as http:
        async with asyncio.timeout(within_s):
            while True:
                assert worker.poll() is None, "the views died"
                try:
                    answer = await http.get("/views")
                    if answer.is_success and answer.json()["sessions"] == wanted:
                        return answer.json()
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)


async def come_round(url: str, worker: subprocess.Popen[bytes]) -> None:
    """Wait until /healthz tells of a third round, though nothing more comes."""
    async with httpx.AsyncClient(base_url=url, timeout=2) as http, asyncio.timeout(90):
        while (await http.get("/healthz")).json()["loops"].get("work", {"rounds": 0})["rounds"] < 3:
            assert worker.poll() is None, "the views died"
            await asyncio.sleep(0.5)


def environment(live_settings: Settings, tmp_path: Path, port: int) -> dict[str, str]:
    """Of a worker that a supervisor starts."""
    return {
        **os.environ,
        "TURNLOG_INSTANCE": "views-0",
        "TURNLOG_RUN_ID": live_settings.run.id,
        "TURNLOG_RUN_DIRECTORY": str(tmp_path),
        "TURNLOG_KAFKA_BOOTSTRAP": live_settings.kafka.bootstrap,
        "TURNLOG_KAFKA_PREFIX": live_settings.kafka.prefix,
        "TURNLOG_REGISTRY_URL": live_settings.registry.url,
        "TURNLOG_STORE_ENDPOINT": live_settings.store.endpoint,
        "TURNLOG_STORE_SECRET_KEY": live_settings.store.secret_key,
        "TURNLOG_VIEWS_PORT": str(port),
    }


def begun(env: dict[str, str], log: Path, *command: str) -> subprocess.Popen[bytes]:
    """A worker; `command`: what Python runs in place of `turnlog role views`."""
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, *(command or ("-m", "turnlog.cli", "role", "views"))], env=env, stdout=out, stderr=out
        )


@pytest.mark.kafka
@pytest.mark.long  # the suite kills its workers, below
async def test_restarts_with_a_table_to_recover_lose_no_session(live_settings: Settings, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    env = environment(live_settings, tmp_path, port)
    wanted: Counter[str] = Counter()
    async with open_role("test", live_settings) as role:
        for life in range(LIVES):
            await write(role, life)
            wanted = Counter({"open": SESSIONS, "completed": life * SESSIONS})
            worker = begun(env, tmp_path / f"views-{life}.log")
            try:
                await seen(f"http://127.0.0.1:{port}", {k: n for k, n in wanted.items() if n}, worker)
                if life == LIVES - 1:
                    await come_round(f"http://127.0.0.1:{port}", worker)
            finally:
                worker.send_signal(signal.SIGTERM)
                worker.wait(60)
            assert worker.returncode == 0


PATIENT = "from turnlog.plugins import faust_views; faust_views.SESSION_TIMEOUT_S = 85.0; "
"""A group that holds a killed member's partitions for longer (56 s and more: a heartbeat comes every third of it) than
the test waits."""


@pytest.mark.kafka
async def test_the_successor_of_a_killed_worker_has_its_partitions_at_once_and_doubts_its_file(
    live_settings: Settings, tmp_path: Path
) -> None:
    command = ("-c", PATIENT + "from turnlog.cli import main; main(['role', 'views'])")
    wanted = [{"open": SESSIONS}, *({"open": SESSIONS, "completed": life * SESSIONS} for life in (1, 2))]
    async with open_role("test", live_settings) as role:
        for life in range(3):
            await write(role, life)
            port = free_ports(1)[0]  # the group knows its predecessor by another address
            env = environment(live_settings, tmp_path, port)
            worker = begun(env, tmp_path / f"killed-{life}.log", *command)
            try:
                await seen(f"http://127.0.0.1:{port}", wanted[life], worker, within_s=50 if life else 90)
            finally:
                worker.kill()
                worker.wait(60)
            if life == 1:
                of_another_log(tmp_path)


def of_another_log(directory: Path) -> None:
    """What the worker keeps of its sessions is ahead of their changelog, and wrong."""
    (file,) = directory.glob("views-0/**/sessions.sqlite")
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as kept:
        kept.execute("UPDATE offsets SET last = 1000000")
        kept.execute("UPDATE rows SET value = json_set(value, '$.outcome', 'failed')")


@pytest.mark.kafka
@pytest.mark.long  # the suite has a worker's successor, above
async def test_a_worker_that_its_group_gave_up_before_its_first_commit_reads_again_what_was_queued(
    live_settings: Settings, tmp_path: Path
) -> None:
    port, lives = free_ports(1)[0], 40
    async with open_role("test", live_settings) as role:
        worker = begun(environment(live_settings, tmp_path, port), tmp_path / "views.log")
        try:
            await seen(f"http://127.0.0.1:{port}", {}, worker)
            worker.send_signal(signal.SIGSTOP)
            for life in range(lives):
                await write(role, life)
            while await role.log.members(ConsumerGroup.VIEWS.format(run=live_settings.run.id)):  # noqa: ASYNC110
                await asyncio.sleep(0.2)  # a broker tells nobody that a session is over
            worker.send_signal(signal.SIGCONT)
            wanted = {"open": SESSIONS, "completed": (lives - 1) * SESSIONS}
            await seen(f"http://127.0.0.1:{port}", wanted, worker)
        finally:
            worker.send_signal(signal.SIGCONT)
            worker.terminate()
            worker.wait(60)
