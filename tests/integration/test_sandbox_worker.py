"""The sandbox worker as a process, on a real broker, with bubblewrap: calls answered, and answered after kill -9;
durable sessions that survive it; two workers that share partitions.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.addresses import variables
from turnlog.infra.environments.episodes import Episode, SandboxCall
from turnlog.infra.environments.verifiers import SandboxVerifier
from turnlog.infra.environments.verifiers.judges import client
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.plugins.recipes.calc import RECIPE
from turnlog.producers import tool_calls
from turnlog.producers.gateway_client import GatewayClient, OpenSession
from turnlog.producers.verdicts import Bench
from turnlog.schemas.events import (
    Limits,
    Outcome,
    Purpose,
    RewardAssigned,
    RolloutRequested,
    Sampling,
    SandboxSpec,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    ToolStatus,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import TOOL_RESULTS
from turnlog.settings import Settings

pytestmark = pytest.mark.kafka

PROGRAM = """
import logging, os
from turnlog.infra.roles.runs import serve
from turnlog.sandbox_workers.worker import main
from turnlog.settings import load
logging.basicConfig(level=logging.WARNING)
serve("sandbox", main, load(None, os.environ))
"""


def environment(settings: Settings, number: int) -> dict[str, str]:
    """What a worker needs to find the test's servers."""
    ours = {
        **variables(settings),
        "TURNLOG_SANDBOX_FIRST_UID": str(250_000 + 10 * number),
        "TURNLOG_INSTANCE": f"sandbox-{number}",
    }
    return {**{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}, **ours}


@contextmanager
def worker(settings: Settings, number: int = 0) -> Iterator[psutil.Popen]:
    """A worker process; stopped by SIGTERM at the end, unless it is dead."""
    env = environment(settings, number)
    with psutil.Popen([sys.executable, "-c", PROGRAM], env=env, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            _, said = process.communicate(timeout=30)
            print(said.decode())


DURABLE = SandboxSpec(durable_workspace=True)


def call(session: str, seq: int, command: str, **changes: Any) -> ToolCallRequested:
    """A shell call."""
    return dataclasses.replace(plain(session, seq, command), **changes)


def plain(session: str, seq: int, command: str) -> ToolCallRequested:
    """Of a session that keeps nothing."""
    return ToolCallRequested(
        event_id=digest(session, seq),
        run_id="run",
        group_id="g",
        session_id=session,
        floor=0,
        rollout_id=session,
        call_id=f"{session}-{seq}",
        call_seq=seq,
        tool="shell",
        arguments=json.dumps({"command": command}).encode(),
        sandbox=SandboxSpec(),
        workspace=None,
        deadline_s=300.0,
    )


@pytest.fixture
def live_settings(live_settings: Settings) -> Settings:
    """Of the run that the calls here are of."""
    return dataclasses.replace(live_settings, run=dataclasses.replace(live_settings.run, id="run"))


@pytest.fixture
async def role(live_settings: Settings) -> AsyncIterator[Role]:
    """The test's own way into the log."""
    async with open_role("test", live_settings) as role:
        yield role


class Results:
    """agent.tool-results, as they come."""

    def __init__(self, role: Role) -> None:
        self._role = role
        places = [Partition(TOOL_RESULTS.name, number) for number in range(role.settings.kafka.rollouts)]
        self._position = dict.fromkeys(places, 0)
        self.started: list[ToolCallStarted] = []
        self.completed: list[ToolCallCompleted] = []

    async def answer(self, request: ToolCallRequested) -> ToolCallCompleted:
        """Append one request and wait for its effective answer."""
        await self._role.events.append(request)
        await self.until(lambda: bool(self.answers(request)))
        return self.answers(request)[0]

    def answers(self, request: ToolCallRequested) -> list[ToolCallCompleted]:
        """Those of one call that were read."""
        return [answer for answer in self.completed if answer.call_id == request.call_id]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read on until it holds."""
        deadline = time.monotonic() + 90
        async with self._role.log.reader() as reader:
            reader.assign(self._position)
            while not condition():
                assert time.monotonic() < deadline, (self.started, self.completed)
                for record in await reader.poll():
                    event = await self._role.events.decode(record)
                    (self.started if isinstance(event, ToolCallStarted) else self.completed).append(event)  # type: ignore[arg-type]
            self._position = {place: reader.position(place) for place in self._position}


async def feed(role: Role, known: tool_calls.ToolResults) -> None:
    """As the runner's reader does."""
    async with role.log.reader() as reader:
        reader.assign({Partition(TOOL_RESULTS.name, number): 0 for number in range(role.settings.kafka.rollouts)})
        while True:
            for record in await reader.poll():
                event = await role.events.decode(record)
                if isinstance(event, ToolCallCompleted):
                    known.feed(event)


async def test_a_verifier_judges_the_files_that_the_agent_left_and_nothing_that_it_left_running(role: Role) -> None:
    def calls(episode: Episode) -> list[SandboxCall]:
        seen = "cat answer; touch seen; ps ax | grep -c '[s]leep 300'; true"
        return [SandboxCall("shell", {"command": seen}), SandboxCall("shell", {"command": episode.task["check"]})]

    verifier = SandboxVerifier(name="tests", version="1", calls=calls, sandbox=DURABLE, timeout_s=90.0)
    results, known = Results(role), tool_calls.ToolResults()
    acted = call("verified", 0, "echo 8 > answer; nohup sleep 300 >/dev/null 2>&1 &", sandbox=DURABLE)
    request = RolloutRequested(
        event_id="e", run_id="run", group_id="g", floor=0, task_id="t", rollout_id="verified", rollout_index=0,
        group_size=1, draw=0, dataset="d", dataset_epoch=0, index=0, recipe="calc", purpose=Purpose.train, task=b"{}",
        sampling=Sampling(), limits=Limits(), min_weight_version=0,
    )  # fmt: skip

    known.expect("verified")
    feeding = asyncio.create_task(feed(role, known))
    with worker(role.settings):
        assert (await results.answer(acted)).status is ToolStatus.ok
        await known.wait("verified", acted.call_id, 90)  # its reader is another one
        async with GatewayClient(role.settings) as gateway, client() as http:
            bench = Bench(
                http=http, events=role.events, gateway=gateway, results=known, blobs=role.blobs,
                request=request, task=RECIPE.task({"prompt": "?"}),
                session=OpenSession("verified", "", "", ""), asked={},
            )  # fmt: skip
            found = []
            for check, version in (("test $(cat answer) = 8 && ls", "1"), ("test $(cat answer) = 9", "2")):
                episode = Episode(task={"check": check}, messages=(), outcome=Outcome.completed, reason="")
                found.append(await bench.verdict(dataclasses.replace(verifier, version=version), episode))
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)
    assert [getattr(record, "value", record) for record in found] == [1.0, 0.0]
    assert isinstance(found[0], RewardAssigned)
    first, second = json.loads(found[0].evidence)["calls"]
    assert first["end"] == "8\n0\n"
    assert second["end"].split() == ["answer", "seen"]  # files go from call to call


async def test_sessions_are_served_in_order_by_isolated_sandboxes(role: Role) -> None:
    results = Results(role)
    with worker(role.settings):
        calls = [call(f"s{session}", seq, "id -u; pwd") for seq in range(4) for session in range(10)]
        await asyncio.gather(*[await role.events.submit(request) for request in calls])
        await results.until(lambda: len(results.completed) >= len(calls))
    assert {(answer.status, answer.output, answer.worker) for answer in results.completed} == {
        (ToolStatus.ok, b"1000\n/workspace\n", "sandbox-0")
    }
    for session in range(10):
        seqs = [answer.call_seq for answer in results.completed if answer.session_id == f"s{session}"]
        assert seqs == [0, 1, 2, 3]


async def test_kill_9_leaves_no_sandbox_and_the_next_worker_answers(role: Role) -> None:
    results = Results(role)
    with worker(role.settings) as process:
        await role.events.append(call("quick", 0, "echo quick"))
        await results.until(lambda: len(results.completed) == 1)
        await role.events.append(call("slow", 0, "setsid sleep 4 & sleep 4; echo slow"))
        await results.until(lambda: len(results.started) == 2)
        sandboxes = process.children(recursive=True)
        assert any("sandbox_workers.inside." in " ".join(inside.cmdline()) for inside in sandboxes)
        process.kill()
        _, alive = psutil.wait_procs(sandboxes, timeout=10)
        assert alive == []
    with worker(role.settings):
        await role.events.append(call("quick", 0, "echo quick"))
        await results.until(lambda: {"slow-0"} <= {answer.call_id for answer in results.completed})
        await results.until(lambda: any(answer.cached for answer in results.completed))
    (slow,) = [answer for answer in results.completed if answer.call_id == "slow-0"]
    assert (slow.status, slow.output, slow.attempt) == (ToolStatus.ok, b"slow\n", 2)
    quick = [answer for answer in results.completed if answer.call_id == "quick-0"]
    assert {(answer.output, answer.attempt) for answer in quick} == {(b"quick\n", 1)}
    assert [event.attempt for event in results.started] == [1, 1, 2]


async def test_a_durable_session_survives_kill_9_of_its_worker(role: Role) -> None:
    """In the middle of a call: its files are those from before it, in another worker's sandbox."""
    results = Results(role)
    with worker(role.settings) as process:
        first = await results.answer(call("s", 0, "echo 1 > f; mkdir -m 700 d; ln -s f l", sandbox=DURABLE))
        second = call("s", 1, "echo 2 >> f; sleep 2; cat l; stat -c %a d", sandbox=DURABLE, workspace=first.workspace)
        await role.events.append(second)
        await results.until(lambda: len(results.started) == 2)
        process.kill()
    with worker(role.settings, 1):
        await results.until(lambda: bool(results.answers(second)))
        (after,) = results.answers(second)
        third = await results.answer(call("s", 2, "cat f", sandbox=DURABLE, workspace=after.workspace))
    assert (after.status, after.output, after.attempt, after.worker) == (ToolStatus.ok, b"1\n2\n700\n", 2, "sandbox-1")
    assert third.output == b"1\n2\n"


@pytest.mark.long  # the suite has two workers in memory (test_worker_takeover.py)
async def test_two_workers_share_sessions_and_repeat_no_answered_call(role: Role) -> None:
    """One comes while sessions run, and goes again."""
    results = Results(role)
    workspaces: dict[str, Any] = {f"s{number}": None for number in range(8)}

    async def round_(seq: int) -> None:
        calls = {
            name: call(name, seq, f"echo {seq} >> f; cat f", sandbox=DURABLE, workspace=workspace)
            for name, workspace in workspaces.items()
        }
        await asyncio.gather(*[await role.events.submit(request) for request in calls.values()])
        await results.until(lambda: all(results.answers(request) for request in calls.values()))
        for name, request in calls.items():
            answer = results.answers(request)[0]
            assert answer.output.split() == [b"%d" % number for number in range(seq + 1)], answer
            workspaces[name] = answer.workspace

    with worker(role.settings):
        await round_(0)
        rounds = itertools.count(1)
        with worker(role.settings, 1):
            while {answer.worker for answer in results.completed} < {"sandbox-0", "sandbox-1"}:
                await round_(next(rounds))
        await round_(last := next(rounds))
    answers = [answer.call_id for answer in results.completed if not answer.cached]
    assert len(results.started) == len(answers) == len(set(answers)) == 8 * (last + 1)
