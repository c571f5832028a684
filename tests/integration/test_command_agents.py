"""Agents that are a program in a real sandbox, run by a real worker, at the real gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import http.server
import json
import logging
import threading
import types
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.memory_log import MemoryLog
from tests.fakes.offers import offering
from tests.integration.conftest import Stage
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.environments.agents import CommandAgent
from turnlog.infra.environments.episodes import Episode, FunctionVerifier, Verdict
from turnlog.infra.environments.tasks import Recipe
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.producers.gateway_client import GatewayClient
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers import worker
from turnlog.sandbox_workers.pooling.worker_pools import find_isolation_failure
from turnlog.sandbox_workers.workspaces.folder import Folder
from turnlog.sandbox_workers.workspaces.store import Workspaces
from turnlog.schemas import topics
from turnlog.schemas.events import (
    EngineGone,
    EngineRegistered,
    Outcome,
    RewardAssigned,
    RolloutRequested,
    SandboxLimits,
    SandboxSpec,
    SessionStarted,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
)

SANDBOX = SandboxSettings(slots=2, prewarm=0, first_uid=287_000)
ASKS = """\
import json, os, sys, urllib.request
def ask(*said):
    body = {"model": "m", "messages": [{"role": "user", "content": "3 + 5 = ?"}, *said]}
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
WORKS = (
    ASKS
    + """\
import subprocess
said = []
while (word := ask(*said)) != "done":
    ran = subprocess.run(word, shell=True, capture_output=True, text=True)
    said += [{"role": "assistant", "content": word}, {"role": "user", "content": "out " + ran.stdout}]
    print("ran", word)
"""
)
LOOKS = (
    ASKS
    + """\
import glob, socket
seen = [repr(dict(os.environ))]
texts = ("/proc/*/environ", "/proc/*/cmdline", "/workspace/**", "/tmp/**", "/etc/turnlog/**", "/opt/init/**")
for path in [path for pattern in texts for path in glob.glob(pattern, recursive=True)]:
    try:
        seen.append(open(path, "rb").read(1 << 20).decode("latin-1"))
    except OSError:
        pass
open("seen", "w").write("\\n".join(seen))
def reached(url, direct):
    way = urllib.request.ProxyHandler({} if direct else None)
    try:
        return urllib.request.build_opener(way).open(url, timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return "no way"
places = json.loads(sys.argv[1])
json.dump({url: [reached(url, True), reached(url, False)] for url in places}, open("reached", "w"))
ask()
"""
)


class Programs(Recipe):
    """A recipe whose agent is a program; `judged` are the episodes that its verifier saw."""

    agent: CommandAgent
    sandbox = SandboxSpec(limits=SandboxLimits(output_bytes=4096))

    def __init__(self, name: str) -> None:
        self.name = name
        self.judged: list[Episode] = []
        self.verifier = FunctionVerifier("kept", "1", self._judge)

    def _judge(self, episode: Episode) -> Verdict:
        self.judged.append(episode)
        return Verdict(1.0)

    def runs(self, program: str, *arguments: str, **more: Any) -> Programs:
        """The agent from now on."""
        argv = ("python3", "agent.py", *arguments)
        self.agent = CommandAgent(name="mine", version="7", argv=argv, files={"agent.py": program}, **more)
        return self


OFFERED = types.SimpleNamespace(**{name: Programs(name) for name in ("a", "b", "c", "d", "e", "f")})


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """Recipes that an installed package offers."""
    for recipe in vars(OFFERED).values():
        recipe.judged.clear()
    points = {name: f"{__name__}:OFFERED.{name}" for name in vars(OFFERED)}
    with offering(tmp_path, monkeypatch, "programs", points):
        yield OFFERED


@pytest.fixture
async def stage(stage: Stage) -> Stage:
    """Without the stand-in for a worker."""
    if await find_isolation_failure(SANDBOX):
        pytest.skip("user namespaces are off")
    stage.answers = lambda request, count: None
    stage.settings = dataclasses.replace(
        stage.settings, runner=dataclasses.replace(stage.settings.runner, tool_deadline_s=60.0)
    )
    return stage


BLOBS = MemoryBlobs()


async def left(folder: Path, episode: Episode) -> Path:
    """The program's files."""
    assert episode.ended is not None
    assert episode.ended.workspace is not None
    await asyncio.to_thread(folder.mkdir)
    await Workspaces(BLOBS).restore(Folder(folder), episode.ended.workspace, disk_bytes=1 << 26)
    return folder


@asynccontextmanager
async def working(stage: Stage, **changed: Any) -> AsyncIterator[None]:
    """A real worker, its sandboxes bubblewraps. `changed`: of [sandbox]."""
    settings = dataclasses.replace(stage.settings, sandbox=dataclasses.replace(SANDBOX, **changed))
    log = MemoryLog(stage.broker)
    async with EventLog.open(log, stage.registry, writer="worker", blobs=BLOBS) as events:
        role = Role("sandbox", "sandbox-1", settings, log, events, BLOBS, Health("sandbox"))
        task = asyncio.create_task(worker.main(role))
        stage.others.append(task)
        try:
            yield
        finally:
            role.stopping.set()
            await task


async def until(stage: Stage, kind: type, count: int = 1) -> None:
    async with asyncio.timeout(60):
        while len(await stage.said(kind)) < count:
            stage.check_alive()
            await stage.broker.changed(1)


async def outcomes(stage: Stage, sessions: int) -> list[tuple[Outcome, bool, str]]:
    return [(one.outcome, one.final, one.reason) for one in await stage.finished(sessions, seconds=90)]


async def test_a_program_works_by_turns_of_the_policy_and_what_it_leaves_is_judged(
    stage: Stage, offered: Any, tmp_path: Path
) -> None:
    offered.a.runs(WORKS)
    stage.policy = lambda prompt: "done" if "out ok" in prompt else "echo 8 >x; echo ok"
    await stage.request(recipe="a")
    async with working(stage), stage.gateway(), stage.running():
        assert await outcomes(stage, 1) == [(Outcome.completed, True, "")]
    [episode] = offered.a.judged
    assert episode.messages[-1]["content"] == "done"
    ended = episode.ended
    assert (ended.exit_code, ended.output) == (0, "ran echo 8 >x; echo ok\n")
    await left(tmp_path / "left", episode)
    assert (tmp_path / "left/x").read_text() == "8\n"
    [started] = await stage.said(SessionStarted)
    assert (started.agent.name, started.agent.version) == ("mine", "7")
    [call] = await stage.said(ToolCallCompleted)
    assert call.requests == ()  # turns are no traffic of the network


class Host(http.server.BaseHTTPRequestHandler):
    """Something else on the host's loopback."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


async def test_a_program_sees_no_token_and_reaches_the_gateway_alone(
    stage: Stage, offered: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        beside, gateway = f"http://127.0.0.1:{host.server_port}/", stage.settings.gateway.url
        own = "http://127.0.0.1:3128"
        places = [beside, f"{gateway}/v1/models", "http://169.254.169.254/", f"{own}/sessions/s", f"{own}/v1/models"]
        offered.a.runs(LOOKS, json.dumps(places))
        await stage.request(recipe="a")
        async with working(stage), stage.gateway(), stage.running():
            assert await outcomes(stage, 1) == [(Outcome.completed, True, "")]
            [request] = await stage.said(RolloutRequested)
            async with GatewayClient(stage.settings) as client:
                token = (await client.open(request, offered.a.task({"prompt": "?"}), 0)).token
        host.shutdown()
    await left(tmp_path / "left", offered.a.judged[0])
    reached = json.loads((tmp_path / "left/reached").read_text())
    assert reached == {
        beside: ["no way", "no way"],  # NO_PROXY names loopback, and the sandbox has its own
        f"{gateway}/v1/models": ["no way", "no way"],
        "http://169.254.169.254/": ["no way", 403],
        f"{own}/sessions/s": [403, 403],
        f"{own}/v1/models": [200, 200],
    }
    secret, mac = token.split(".")
    seen = (tmp_path / "left/seen").read_text()
    assert "OPENAI_API_KEY" in seen
    written = [
        record.value
        for topic in topics.BY_NAME
        for number in range(stage.broker.partitions(topic))
        for record in stage.broker.read(Partition(topic, number), 0, 10**6)[0]
    ]
    assert len(written) > 5
    for part in (secret, mac):
        assert part not in seen
        assert part not in caplog.text
        assert not any(part.encode() in value for value in written)


STREAMS = (
    ASKS
    + """\
import time
body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "3 + 5 = ?"}]}).encode()
headers = {"content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
    first = answer.read1()
    print("streamed" if first.startswith(b"data:") and b"[DONE]" not in first else first)
"""
)


ENDS = {
    "a": (ASKS + "ask(); sys.exit(3)", (Outcome.completed, True, "exit 3"), ""),
    "b": (ASKS + "ask(); print('x' * 10**6); print('the end')", (Outcome.completed, True, ""), "the end\n"),
    "c": ("print('I had no idea')", (Outcome.infra_failure, False, "(exit 0): I had no idea"), None),
    "d": ("", (Outcome.infra_failure, False, "missing: command not found"), None),
    "e": (ASKS + "ask(); held = bytearray(10**9)", (Outcome.agent_error, True, "memory_bytes"), ""),
    "f": (STREAMS, (Outcome.completed, True, ""), "streamed\n"),
}


async def test_every_end_of_a_program_has_its_outcome_and_its_exit_status_proves_nothing(
    stage: Stage, offered: Any
) -> None:
    for name, (program, _, _) in ENDS.items():
        getattr(offered, name).runs(program)
        await stage.request(group=name, recipe=name)
    offered.d.agent = dataclasses.replace(offered.d.agent, argv=("missing", "x"))
    async with working(stage), stage.gateway(), stage.running():
        await stage.finished(len(ENDS) + 2, seconds=120)
    finishes = {one.group_id: one for one in reversed(await stage.finished(0))}
    for name, (_, (outcome, final, reason), printed) in ENDS.items():
        finish, judged = finishes[name], getattr(offered, name).judged
        assert (finish.outcome, finish.final) == (outcome, final), (name, finish)
        assert reason in finish.reason if "infra" in outcome else reason == finish.reason, (name, finish)
        assert len(judged) == (printed is not None)
        assert printed is None or judged[0].ended.output.endswith(printed)
    assert offered.a.judged[0].ended.exit_code == 3
    assert "bytes left out]" in offered.b.judged[0].ended.output
    assert len(offered.b.judged[0].ended.output) <= 4096
    assert {reward.group_id for reward in await stage.said(RewardAssigned)} == {"a", "b", "e", "f"}


async def test_a_program_that_hangs_is_truncated_and_judged_by_what_it_left(
    stage: Stage, offered: Any, tmp_path: Path
) -> None:
    offered.a.runs(ASKS + "open('half', 'w').write(ask()); print('waiting', flush=True)\nimport time; time.sleep(1e6)")
    stage.policy = lambda prompt: "8"
    await stage.request(recipe="a", deadline_s=6.0)
    async with working(stage), stage.gateway(), stage.running():
        assert await outcomes(stage, 1) == [(Outcome.truncated, True, "deadline")]
    [episode] = offered.a.judged
    assert (episode.ended.exit_code, episode.ended.output) == (None, "waiting\n")
    await left(tmp_path / "left", episode)
    assert (tmp_path / "left/half").read_text() == "8"


async def test_what_a_program_waits_for_an_engine_is_not_of_its_deadline(stage: Stage, offered: Any) -> None:
    offered.a.runs(ASKS + "ask()")
    stage.policy = lambda prompt: "8"
    await stage.engine_says(EngineGone, state="gone", cause="killed")
    await stage.request(recipe="a", deadline_s=10.0)
    async with working(stage), stage.gateway(), stage.running():
        await until(stage, ToolCallStarted)
        await asyncio.sleep(12.0)
        await stage.engine_says(EngineRegistered, model="m")
        assert await outcomes(stage, 1) == [(Outcome.completed, True, "")]


async def test_a_program_goes_on_under_another_runner(stage: Stage, offered: Any) -> None:
    """It knows nothing of runners: its call is waited for again, and does not run again."""
    offered.a.runs(ASKS + "ask(); print(ask({'role': 'user', 'content': 'more'}))")
    await stage.request(recipe="a")
    async with stage.gateway():
        async with stage.running():
            await until(stage, ToolCallRequested)
        async with working(stage), stage.running(instance="r-2"):
            assert await outcomes(stage, 1) == [(Outcome.completed, True, "")]
    assert len(await stage.said(ToolCallStarted)) == 1


async def test_a_program_whose_worker_died_is_not_run_twice_in_its_session(stage: Stage, offered: Any) -> None:
    offered.a.runs(ASKS + "ask()")
    await stage.request(recipe="a")
    async with stage.gateway(), stage.running():
        await until(stage, ToolCallRequested)
        [call] = await stage.said(ToolCallRequested)
        names = ("run_id", "group_id", "session_id", "floor", "rollout_id", "call_id")
        same = {name: getattr(call, name) for name in names}
        await stage.events.append(ToolCallStarted(event_id="dead", attempt=1, worker="dead", **same))
        async with working(stage):
            ended = await outcomes(stage, 2)
    assert [one[:2] for one in ended] == [(Outcome.infra_failure, False), (Outcome.completed, True)]
    assert "not run again" in ended[0][2]
    assert [one.worker for one in await stage.said(ToolCallStarted)] == ["dead", "sandbox-1"]


async def test_a_limit_that_the_gateway_refused_a_turn_for_truncates(stage: Stage, offered: Any) -> None:
    offered.a.runs(ASKS + "ask(); ask()")
    await stage.request(recipe="a", max_turns=1)
    async with working(stage), stage.gateway(), stage.running():
        assert await outcomes(stage, 1) == [(Outcome.truncated, True, "max_turns")]


async def test_a_worker_with_another_key_says_which_setting_to_mend(stage: Stage, offered: Any) -> None:
    offered.a.runs(ASKS + "ask()")
    await stage.request(recipe="a")
    async with working(stage, credential_key="another-than-the-stage's"), stage.gateway(), stage.running():
        first, _ = await outcomes(stage, 2)
    assert first[:2] == (Outcome.infra_failure, False)
    assert "[sandbox] credential_key" in first[2]
