"""The whole loop on one machine, three steps, with the assembler and the trainer killed -9 in the middle of it.

Equal means: every sample and batch equals the offline fold of the same topics, and the trainer re-run from its first
checkpoint over the same manifests gives the same losses, bit for bit.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from turnlog.consumers.index.indexer import build
from turnlog.consumers.index.influence import influence
from turnlog.consumers.index.lineage import LineageReader
from turnlog.consumers.index.reader import Index
from turnlog.infra.code_version import code_version
from turnlog.infra.embedded.up import down, status_processes, up
from turnlog.infra.history import all_events
from turnlog.infra.roles.role import open_role
from turnlog.infra.run_folder import read_endpoints, resolve_endpoints
from turnlog.plugins.faust_views import MOVING
from turnlog.schemas import topics
from turnlog.schemas.events import Outcome, RewardAssigned, SampleBatchFormed, SegmentSample, StepCompleted
from turnlog.settings import Settings, load
from turnlog.verbs.report import newest_incarnations

DRAWS = 3
PATIENCE = 100
"""Requests for the status before the views count as stuck; each takes a second or more."""
SETTINGS = f"""
[run]
id = "closed-loop"
directory = "{{directory}}"
[feeder]
draws = {DRAWS}
group_size = 4
[batcher]
prompts_per_draw = 4
[trainer]
warm_start_steps = 120
threads = 1
"""
CRITIC = """
[run]
id = "critic"
directory = "{directory}"
[feeder]
draws = 2
group_size = 4
max_turns = 2
[fold]
estimator = "none"
[batcher]
prompts_per_draw = 2
[eval]
every = 1
tasks = 2
samples = 2
[trainer]
algorithm = "ppo"
truncated = "bootstrap"
gae_lambda = 0.95
checkpoints_kept = 1
warm_start_steps = 60
threads = 1
"""

pytestmark = [pytest.mark.kafka, pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(900)]


class Loop:
    """A run that is up, reached as a user does: by the command line."""

    def __init__(self, directory: Path, settings: str = SETTINGS) -> None:
        self.directory = directory / "run"
        self.file = directory / "settings.toml"
        self.file.write_text(settings.format(directory=self.directory))
        self.said = ""
        """By `turnlog up`."""

    def turnlog(self, *verb: str, file: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "turnlog.cli", "--settings", str(file or self.file), *verb]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    @property
    def kept(self) -> Path:
        """The settings in effect, as `up` wrote them."""
        return self.directory / "settings.toml"

    @property
    def settings(self) -> Settings:
        return load(self.kept, {})

    def pid(self, name: str) -> int:
        return next(child["pid"] for child in status_processes(self.settings) if child["name"] == name)

    def events(self, topic: topics.Topic) -> list[Any]:
        async def read() -> list[Any]:
            async with open_role("test", self.settings) as role:
                return await all_events(role, topic)

        return asyncio.run(read())

    def steps(self) -> list[StepCompleted]:
        return self.events(topics.STEPS)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    """The run, trained to its end, with two kills on the way."""
    loop = Loop(tmp_path_factory.mktemp("loop"))
    started = loop.turnlog("up")
    assert started.returncode == 0, started.stderr
    loop.said = started.stderr
    try:
        command = [sys.executable, "-m", "turnlog.cli", "--settings", str(loop.kept), "run"]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        asyncio.run(_killed_midway(loop, running))
        said, _ = running.communicate(timeout=600)
        assert running.returncode == 0, said
        yield loop
    finally:
        if status_processes(loop.settings):
            down(loop.settings)


async def _killed_midway(loop: Loop, running: subprocess.Popen[str]) -> None:
    """Kill -9 the assembler when the first turns are on the log, the trainer when its first step is."""
    async with open_role("test", loop.settings) as role:
        for topic, victim in ((topics.TURNS, "assembler-0"), (topics.STEPS, "trainer-0")):
            while not await all_events(role, topic):
                assert running.poll() is None, running.communicate()[0]
                await asyncio.sleep(0.05)  # another process writes: there is nothing here to wait on
            os.kill(loop.pid(victim), signal.SIGKILL)


async def _indexed(loop: Loop, path: Path) -> None:
    async with open_role("index", loop.settings) as role:
        await build(role, path)


def _check_facts(found: dict[str, Any]) -> None:
    """Every fact is recorded, and names this checkout."""
    made_of = found["made_of"]
    roles = {share["value"]["role"]: share["value"]["code"] for share in made_of["code"]}
    assert roles.keys() >= {"feeder", "gateway", "rewards", "sandbox worker", "weight loader", "assembler", "trainer"}
    assert set(roles.values()) == {code_version()}, "this checkout does not change while its run trains"
    assert [share["value"]["packages"] for share in made_of["environment"]] == [{"turnlog": code_version()}]
    assert [share["value"]["engine"] for share in made_of["engine"]] == ["sglang"]
    assert made_of["source"][0]["value"]["dataset"]
    assert Path(found["runs"][0]["started_from"]).exists()
    assert found["runs"][0]["chain"][0]["version"] == 0


def test_the_lineage_of_the_weights_is_what_a_plain_reading_of_the_log_says(loop: Loop, tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"  # not that of the run's own indexer, which may be behind
    asyncio.run(_indexed(loop, path))
    with LineageReader.open(lambda run: path) as reader:
        found = reader.weights(loop.settings.run.id, None).body()
        listed = {row["session_id"]: row["tokens"] for row in reader.sessions(loop.settings.run.id, None)}
    done = {step.batch_index: step for step in newest_incarnations(loop.steps())}
    batches = [each for each in loop.events(topics.BATCHES) if isinstance(each, SampleBatchFormed)]
    tokens = Counter[str]()
    for batch in batches:
        if not done[batch.batch_index].skipped:
            tokens.update({row.session_id: 0 for row in batch.samples})
            for row in batch.samples:
                tokens[row.session_id] += row.trained_tokens
    assert listed == tokens
    trained = sum(batch.trained_tokens - sum(done[batch.batch_index].masked.values()) for batch in batches)
    assert found["totals"]["tokens"] - found["totals"]["masked"] == trained
    rewards = {each.session_id: each.value for each in loop.events(topics.SESSIONS) if isinstance(each, RewardAssigned)}
    assert found["totals"]["reward"] == pytest.approx(sum(rewards[name] for name in tokens) / len(tokens))
    _check_facts(found)
    one = next(iter(tokens))
    with Index.open(path) as index:
        told = influence(index, one, loop.settings)
    assert told is not None
    counted = [each for each in told.effects if each.incarnation == done[each.batch].incarnation]
    assert sum(each.tokens for each in counted if not each.skipped) == tokens[one]
    assert told.direct


def test_every_draw_is_trained_once_in_the_history_that_counts(loop: Loop) -> None:
    steps = newest_incarnations(loop.steps())
    assert [step.batch_index for step in steps] == list(range(DRAWS))
    assert [step.step for step in steps] == list(range(1, DRAWS + 1))
    assert max(step.incarnation for step in steps) >= 1
    restarts = {child["name"]: child["restarts"] for child in status_processes(loop.settings)}
    assert restarts["assembler-0"] >= 1
    assert restarts["trainer-0"] >= 1


def test_the_offline_fold_of_the_topics_gives_every_sample_and_batch(loop: Loop) -> None:
    done = loop.turnlog("replay", "--verify", file=loop.kept)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical" in done.stdout


def test_the_books_balance_and_the_report_says_so(loop: Loop) -> None:
    done = loop.turnlog("log", "books", file=loop.kept)
    assert done.returncode == 0, done.stdout + done.stderr
    done = loop.turnlog("log", "report", file=loop.kept)
    assert done.returncode == 0, done.stdout + done.stderr
    body = json.loads((loop.directory / "report.json").read_text())
    assert body["sampled_tokens"] == body["trained_tokens"] + sum(body["masked_tokens"].values()) > 0
    assert body["steps"] == DRAWS
    assert body["replay"]["identical"]
    assert body["replay"]["batches_compared"] == DRAWS
    assert body["max_lag_seen"] == 0
    assert set(body["weight_versions_acknowledged"]) == {"engine-0"}
    assert not body["weight_versions_unanswered"]
    assert body["logprob_gap_max"] < 1e-4


def test_a_rerun_from_the_first_checkpoint_gives_the_same_losses_bit_for_bit(loop: Loop) -> None:
    logged = [step.loss for step in newest_incarnations(loop.steps())]
    program = (
        "import json, sys; from pathlib import Path; from turnlog.settings import load\n"
        "from turnlog.trainer.loop import rerun\n"
        "print(json.dumps(rerun(load(Path(sys.argv[1]), {}), None, int(sys.argv[2]))))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(loop.kept), str(DRAWS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == logged


def test_the_status_shows_roles_lag_and_versions(loop: Loop) -> None:
    def asked() -> Any:
        found = json.loads(loop.turnlog("status", "--json", file=loop.kept).stdout)
        assert found["views"].get("unavailable", MOVING) == MOVING
        return found

    # The views follow the log, and move when one of their workers comes or goes.
    for _ in range(PATIENCE):
        found = asked()
        newest = found["views"].get("newest_version")
        if found["views"].get("steps") == DRAWS and newest == found["engines"]["engine-0"]["version"]:
            break
    else:
        pytest.fail(f"the views did not catch up: {json.dumps(found, indent=1)}")
    assert {child["name"] for child in found["processes"]} >= {"kafka", "gateway-0", "assembler-0", "engine-0"}
    assert found["lag"]["assembler"] == {"agent.sessions": 0, "agent.turns": 0, "agent.token-snapshots": 0}


def test_the_dashboard_of_a_run_that_is_up_shows_its_sessions(loop: Loop) -> None:
    page = read_endpoints(loop.directory).dashboard
    assert f"dashboard {page}\n" in loop.said.partition(" s  ")[0], "before anything is ready"
    shown = httpx.get(f"{page}/sessions", timeout=30)
    assert shown.status_code == 200
    sessions = set(re.findall(r'href="/sessions/(\w+)"', shown.text))
    assert len(sessions) >= DRAWS * 4 * 4
    one = min(sessions)
    assert f'data-session="{one}"' in httpx.get(f"{page}/sessions/{one}", timeout=30).text


def test_a_run_that_is_trained_to_its_end_is_over_at_once_when_it_is_run_again(loop: Loop) -> None:
    done = loop.turnlog("run", file=loop.kept)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{DRAWS} steps trained" in done.stdout
    assert len(newest_incarnations(loop.steps())) == DRAWS


def benchmark(name: str, settings: Path) -> dict[str, Any]:
    script = Path(__file__).parents[2] / f"benchmarks/{name}.py"
    done = subprocess.run([sys.executable, str(script), str(settings)], capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert done.stdout, done.stderr
    line: dict[str, Any] = json.loads(done.stdout)
    return line


def test_the_benchmark_of_modes_measures_such_a_run(loop: Loop) -> None:
    line = benchmark("modes", loop.kept)
    assert (line["id"], line["unit"], line["share"], line["ok"]) == ("MODES", "steps/s closed-loop", None, True)
    measured = line["detail"]["closed-loop"]
    assert measured["lags"] == [0] * DRAWS
    assert measured["books_balance"]


def test_ids_hashes_and_joins_hold_for_a_reader_without_turnlog(loop: Loop) -> None:
    settings, script = resolve_endpoints(loop.settings), Path(__file__).parents[2] / "examples/check_without_turnlog.py"
    assert not re.search(r"^(import|from) turnlog", script.read_text(), re.MULTILINE)
    places = settings.kafka.bootstrap, settings.registry.url, settings.store.endpoint, settings.store.bucket
    keys = {
        "AWS_ACCESS_KEY_ID": settings.store.access_key, "AWS_SECRET_ACCESS_KEY": settings.store.secret_key,
        "KAFKA_PASSWORD": settings.kafka.password, "REGISTRY_PASSWORD": settings.registry.password,
    }  # fmt: skip
    command = [sys.executable, str(script), *places, settings.kafka.prefix]
    done = subprocess.run(command, env=os.environ | keys, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    checked = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert checked[0] == DRAWS
    assert all(checked)


@pytest.mark.long  # as other benchmarks that take longer than 10 s
def test_the_benchmark_of_the_loop_holds_such_a_run_against_the_bare_one(loop: Loop) -> None:
    """The last to use the engine: the bare loop puts its own weights there."""
    line = benchmark("loop", loop.kept)
    assert (line["id"], line["unit"], line["goal_share"]) == ("LOOP", "s", 0.6)
    assert line["detail"] == {"steps": DRAWS, "sessions": DRAWS * 4 * 4, "floor_is": "the bare loop"}
    assert line["share"] == pytest.approx(line["floor"] / line["value"], rel=1e-2)


def test_down_leaves_no_process_and_up_opens_the_run_again(loop: Loop) -> None:
    children = [child["pid"] for child in status_processes(loop.settings) if child["pid"]]
    assert loop.turnlog("down", file=loop.kept).returncode == 0
    assert not [pid for pid in children if psutil.pid_exists(pid)]
    servers_only = load(loop.kept, {"TURNLOG_ENGINE_URLS": "http://127.0.0.1:9"})
    up(servers_only, roles=(), say=lambda _: None)
    try:
        done = loop.turnlog("replay", "--verify", file=loop.kept)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        down(servers_only, say=lambda _: None)


@pytest.mark.long  # the suite has a critic, rounds and what they keep each by itself
def test_a_loop_with_a_critic_is_evaluated_as_it_trains_and_gives_its_best_weights(tmp_path: Path) -> None:
    loop = Loop(tmp_path, CRITIC)
    started = loop.turnlog("up")
    assert started.returncode == 0, started.stderr
    try:
        for verb in (("run",), ("log", "books")):
            done = loop.turnlog(*verb, file=loop.kept)
            assert done.returncode == 0, done.stdout + done.stderr
        first, second = newest_incarnations(loop.steps())
        assert first.metrics["value_mean"] == 0.0
        moved = second.metrics["value_mean"] != 0.0
        assert moved is (first.reward_mean > 0.0), "of a draw without any reward a critic learns the 0 that it said"
        assert first.metrics["value_updates"] == second.metrics["value_updates"] == 1.0
        samples = (event for event in loop.events(topics.SAMPLES) if isinstance(event, SegmentSample))
        assert {sample.outcome for sample in samples} == {Outcome.completed, Outcome.truncated}
        told = json.loads(loop.turnlog("log", "eval", "--json", file=loop.kept).stdout)
        assert told["groups"]["scored"] == told["groups"]["asked"] >= 4
        best = next(version for version in told["versions"] if version["version"] == told["best"])
        assert list(loop.directory.glob(f"checkpoints/step-{best['step']:08}-i*"))
        done = loop.turnlog("export", str(tmp_path / "best"), "--best", file=loop.kept)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"version {told['best']} (step {best['step']}" in done.stdout
        assert (tmp_path / "best/model.safetensors").exists()
    finally:
        down(loop.settings)


@pytest.mark.long
def test_engine_and_trainer_take_turns_on_one_device(tmp_path: Path) -> None:
    """Two draws; on CPU SGLang gives back no memory, and is asked for it all the same."""
    shared = SETTINGS.replace(f"draws = {DRAWS}", "draws = 2") + "[engine]\ncolocate = true\n"
    loop = Loop(tmp_path, shared)
    started = loop.turnlog("up")
    assert started.returncode == 0, started.stderr

    async def read() -> list[list[Any]]:
        async with open_role("test", loop.settings) as role:
            return [await all_events(role, topic) for topic in (topics.ENGINES, topics.STEPS)]

    try:
        ran = loop.turnlog("run", file=loop.kept)
        assert ran.returncode == 0, ran.stderr
        reports, steps = asyncio.run(read())
    finally:
        down(loop.settings)
    said = [(report.state, report.version) for report in reports]
    assert said[:5] == [("starting", -1), ("serving", 0), ("released", 0), ("serving", 1), ("released", 1)]
    assert [report.published for report in reports[2:5:2]] == [0, 1]
    assert [step.batch_index for step in steps] == [0, 1]
    assert max(step.logprob_gap_max for step in steps) < 1e-4
