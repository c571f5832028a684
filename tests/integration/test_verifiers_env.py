"""Environments of verifiers, unchanged: upstream's package in an environment of its own, at the real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from tests.integration.conftest import Stage
from tests.upstream_environments import UV, locked_python
from tests.verifiers_env.scripted_openai import scripted_openai
from turnlog.environments import AgentSession, task_source
from turnlog.infra.environments.sources import join_source
from turnlog.plugins.recipes.calc import RECIPE as CALC
from turnlog.plugins.verifiers_env.process import EnvironmentOptions, EpisodeFailed, NotStarted, ProcessDied
from turnlog.schemas.events import Outcome, RewardAssigned, RewardFailed, SessionFinished, SessionStarted, TurnCompleted
from turnlog.settings import EngineSettings

ROOT = Path(__file__).parents[2]
NO_PACKAGE = "no registry gives verifiers"
PACKAGES = ROOT / "tests/verifiers_env/packages"
WORDS = "cat dog goat frog tiger"
CONTEXT = 1 << 15
SECRET, MARK = "key-of-the-session-4711", "verifiers-environment-test"


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of an environment with verifiers."""
    return locked_python("verifiers", NO_PACKAGE)


@pytest.fixture(scope="session")
def classic_python() -> Path:
    """The interpreter of an environment with the last verifiers that has the older interface."""
    return locked_python("verifiers-classic", NO_PACKAGE)


@pytest.fixture(scope="module")
def calc_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the stage, with room for the prompts of games: its tokens are bytes."""
    folder = tmp_path_factory.mktemp("model")
    CALC.warm_start.write_tokenizer(folder)
    config = CALC.warm_start.model.config() | {"max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What environments read beside their options: our packages, uv, and the words of TextArena's games."""
    folder = tmp_path / "nltk/corpora/words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / name).write_text(WORDS.replace(" ", "\n") + "\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    monkeypatch.setenv("LAB_JUDGE", "key-of-the-judge")
    monkeypatch.setenv("PATH", f"{UV.parent}:{os.environ['PATH']}")


def hangman(prompt: str) -> str:
    """Guess the word by its length: at once, at the second try, or not at all and against the rules."""
    turn = prompt.count("<|im_start|>assistant")
    if "C04" in prompt:
        return "It must be [tiger]."
    return "No idea." if "C03" in prompt else f"Is it [{'cat' if turn == 1 else 'dog'}]?"


UPSTREAM = """
import asyncio, itertools, json, sys
import verifiers.v1 as vf
env_id, args, url, count = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
async def main():
    env = vf.load_environment(vf.resolve_env_config({**args, "taskset": {**args.get("taskset", {}), "id": env_id}}))
    context = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url=url, api_key_var="NONE"))
    tasks = list(itertools.islice(env.taskset, count))
    async with env.serving():
        found = await asyncio.gather(*(env.run_slot(slot, context) for task in tasks for slot in env.slots(task)))
    return [{"key": e.task.key, "ok": e.ok, "rewards": {n: r.value for n, r in e.traces[0].rewards.items()},
             "metrics": dict(e.traces[0].metrics), "turns": e.traces[0].num_turns} for e in found]
print(json.dumps(asyncio.run(main())), file=open(sys.argv[5], "w"))
"""


async def upstream(python: Path, env: str, args: dict[str, Any], answers: Any, count: int, folder: Path) -> list[Any]:
    """Return what upstream's own runner says about the first tasks, with the same answers of the model."""
    async with scripted_openai(answers) as url:
        command = [python, "-c", UPSTREAM, env, json.dumps(args), url, str(count), folder / "upstream.json"]
        done = await asyncio.create_subprocess_exec(*map(str, command), stderr=asyncio.subprocess.PIPE)
        _, said = await done.communicate()
    assert done.returncode == 0, said.decode()[-3000:]
    found: list[Any] = json.loads((folder / "upstream.json").read_text())
    return found


def source(python: Path, env: str, **options: Any) -> str:
    """Return the text of a source. `args` may be an object."""
    said = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    return join_source("verifiers", {"env": env, "python": str(python), "variables": "PYTHONPATH,LAB_JUDGE", **said})


def first_rows(text: str, count: int, seed: int = 0) -> list[Mapping[str, Any]]:
    """Return the first rows of a source."""
    return list(itertools.islice(task_source(text).tasks(seed), count))


@functools.cache
def counting_rows(python: Path) -> Sequence[Mapping[str, Any]]:
    """Return the tasks of lab_counting, listed once: an import of verifiers takes 6 s of a core."""
    return first_rows(source(python, "lab_counting"), 3)


async def play(stage: Stage, text: str, rows: Sequence[Mapping[str, Any]], **limits: Any) -> list[SessionFinished]:
    """Request a rollout per row, and return the sessions that ended."""
    stage.engine.context = CONTEXT
    stage.settings = dataclasses.replace(stage.settings, engine=EngineSettings(context=CONTEXT))
    for number, row in enumerate(rows):
        limits = {"max_context_tokens": CONTEXT, "max_turns": 40, "deadline_s": 120.0, **limits}
        await stage.request(f"g{number}", recipe=text, task=dict(row), new_tokens=200, **limits)
    async with stage.gateway(), stage.running():
        ended = await stage.finished(len(rows), 280)
    await task_source(text).processes.stop()  # type: ignore[attr-defined]
    return ended


@pytest.mark.long
async def test_a_game_that_nobody_here_wrote_rewards_as_in_the_upstream_runner(
    stage: Stage, python: Path, tmp_path: Path
) -> None:
    args = {"taskset": {"game": "Hangman-v0"}}
    text = source(python, "textarena", args=args)
    rows = first_rows(text, 20)
    places = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    expected = await upstream(python, "textarena", {**args, "player": places}, hangman, 20, tmp_path)
    assert [row["id"] for row in rows] == [one["key"] for one in expected]

    stage.policy = hangman
    finished = await play(stage, text, rows)
    assert {(end.outcome, end.final) for end in finished} == {(Outcome.completed, True)}, finished
    started = {one.session_id: one.group_id for one in await stage.said(SessionStarted)}
    rewards = {started[one.session_id]: one for one in await stage.said(RewardAssigned)}
    turns = Counter(started[one.session_id] for one in await stage.said(TurnCompleted))
    for number, one in enumerate(expected):
        reward = rewards[f"g{number}"]
        assert reward.value == pytest.approx(sum(one["rewards"].values())), number
        assert reward.components == pytest.approx(one["rewards"])
        assert turns[f"g{number}"] == one["turns"]
    assert len({reward.value for reward in rewards.values()}) > 1
    assert {one.agent_path for one in await stage.said(TurnCompleted)} == {"main"}


def counting(prompt: str) -> str:
    """Call the tool, answer, and answer again in words."""
    number = prompt.partition("Count to ")[2].partition(" ")[0]
    if "And in words?" in prompt:
        return f"words {number}" if int(number) % 2 == 0 else "no idea"
    if "counted" in prompt:
        return number
    return f'<tool_call>{{"name":"lab_count","arguments":{{"number":{number}}}}}</tool_call>'


async def test_several_turns_a_tool_and_a_judge_of_its_own_reward_as_in_the_upstream_runner(
    stage: Stage, python: Path, tmp_path: Path
) -> None:
    keys: list[str] = []
    stage.policy = counting
    async with scripted_openai(lambda _: "0.5", keys) as judge:
        args = {"taskset": {"task": {"judged": True, "judge": {"base_url": judge, "api_key_var": "LAB_JUDGE"}}}}
        text = source(python, "lab_counting", args=args, split="eval")
        rows = sorted(first_rows(text, 100), key=lambda row: row["data"]["number"])
        args["taskset"]["split"] = "eval"  # type: ignore[assignment]
        places = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        expected = await upstream(python, "lab_counting", {**args, "agent": places}, counting, 100, tmp_path)
        finished = await play(stage, text, rows)
    assert [row["data"]["number"] for row in rows] == [100, 101, 102]
    assert {(end.outcome, end.reason) for end in finished} == {(Outcome.completed, "")}
    started = {one.session_id: one for one in await stage.said(SessionStarted)}
    for reward in await stage.said(RewardAssigned):
        one = expected[int(started[reward.session_id].group_id.removeprefix("g"))]
        assert reward.value == pytest.approx(sum(one["rewards"].values()))
        assert {name: reward.components[name] for name in ("right", "polite")} == pytest.approx(one["rewards"])
        measured = {name: reward.components[f"metric/{name}"] for name in ("calls", "number")}
        assert measured == pytest.approx({name: one["metrics"][name] for name in measured})
        assert "metric/nothing" not in reward.components  # NaN, which is no failure of the reward
    assert {one["rewards"]["right"] for one in expected} == {0.0, 2.0}
    assert set(keys) == {"Bearer key-of-the-judge"}
    environments = {(one.environment.name, one.environment.version) for one in started.values()}
    assert environments == {("verifiers:lab_counting", "verifiers==0.4.0")}
    turns = await stage.said(TurnCompleted)
    assert (len(turns), {turn.agent_path for turn in turns}) == (9, {"main"})


CLASSIC = """
import asyncio, json, sys
import openai, verifiers as vf
from verifiers.clients import OpenAIChatCompletionsClient
async def main():
    env = vf.load_environment("lab_classic", bonus=0.25)
    client = OpenAIChatCompletionsClient(openai.AsyncOpenAI(base_url=sys.argv[1], api_key="k"))
    found = await env.generate(env.get_dataset(), client, "policy")
    return [{"answer": one["answer"], "reward": one["reward"], "metrics": one["metrics"]} for one in found["outputs"]]
print(json.dumps(asyncio.run(main())), file=open(sys.argv[2], "w"))
"""


@pytest.mark.long
async def test_the_older_interface_rewards_as_its_own_runner_does_but_for_rewards_that_raise(
    stage: Stage, classic_python: Path, tmp_path: Path
) -> None:
    def policy(prompt: str) -> str:
        if "Count to 3 " in prompt and "counted" in prompt:
            return "no idea"
        return counting(prompt).replace("lab_count", "count")

    async with scripted_openai(policy) as url:
        command = [classic_python, "-c", CLASSIC, url, tmp_path / "upstream.json"]
        done = await asyncio.create_subprocess_exec(*map(str, command), stderr=asyncio.subprocess.PIPE)
        _, said = await done.communicate()
    assert done.returncode == 0, said.decode()[-3000:]
    expected = {one["answer"]: one for one in json.loads((tmp_path / "upstream.json").read_text())}
    text = source(classic_python, "lab_classic", args={"bonus": 0.25})
    rows = sorted(first_rows(text, 10), key=lambda row: row["data"]["answer"])
    stage.policy = policy
    stage.settings = dataclasses.replace(
        stage.settings, runner=dataclasses.replace(stage.settings.runner, max_attempts=1)
    )
    ended = {end.session_id: end for end in await play(stage, text, rows)}
    groups = {one.session_id: one.group_id for one in await stage.said(SessionStarted)}
    [failed] = [end for name, end in ended.items() if groups[name] == "g0"]
    assert failed.outcome is Outcome.infra_failure
    assert "Error calling reward function right: a bug of the reward" in failed.reason
    assert expected["0"]["metrics"]["right"] == 0.0, "upstream counts it as 0"
    rewards = {groups[one.session_id]: one for one in await stage.said(RewardAssigned)}
    for answer in ("1", "2", "3"):
        found, one = rewards[f"g{answer}"], expected[answer]
        assert found.value == pytest.approx(one["reward"])
        measured = {name: found.components[f"metric/{name}"] for name in one["metrics"]}
        assert measured == pytest.approx(one["metrics"])
    assert len({one.value for one in rewards.values()}) == 2


@pytest.mark.long
async def test_a_limit_of_turns_truncates_the_session_and_the_environment_scores_what_was_done(
    stage: Stage, python: Path
) -> None:
    text = source(python, "textarena", args={"taskset": {"game": "Hangman-v0"}})
    stage.policy = lambda prompt: f"I guess [{'bdf'[prompt.count('<|im_start|>assistant') - 1]}]"
    [end] = await play(stage, text, first_rows(text, 1), max_turns=3)
    assert (end.outcome, end.reason) == (Outcome.truncated, "max_turns")
    [reward] = await stage.said(RewardAssigned)
    assert reward.components == {"game_reward": 0.0}
    assert len(await stage.said(TurnCompleted)) == 3


@pytest.mark.long
async def test_another_role_that_asks_the_policy_is_a_side_call_and_is_not_rewarded(stage: Stage, python: Path) -> None:
    def both(prompt: str) -> str:
        if "role-playing a USER" in prompt:
            return "Count to 2 please." if prompt.count("<|im_start|>assistant") < 2 else "###DONE###"
        return "words 2" if "lab_count" not in prompt else "?"

    args = {"assistant": {"harness": {"id": "null"}}}
    text = source(python, "user-sim+lab_counting", args=args, role="assistant")
    rows = [row for row in first_rows(text, 100) if row["data"]["number"] == 2]
    stage.policy = both
    [end] = await play(stage, text, rows)
    assert end.outcome is Outcome.completed, end.reason
    [reward] = await stage.said(RewardAssigned)
    assert (reward.value, reward.components["metric/user_turns"]) == (2.0, 2.0)
    assert Counter(turn.agent_path for turn in await stage.said(TurnCompleted)) == {"main": 1, "side/user": 2}


def misbehaving(rows: Sequence[Mapping[str, Any]], how: str) -> Mapping[str, Any]:
    return {**rows[0], "data": {**rows[0]["data"], "how": how}}


async def test_failures_of_the_environment_are_infra_failures_and_no_reward_is_zero(stage: Stage, python: Path) -> None:
    stage.policy = lambda prompt: "words 0"
    stage.settings = dataclasses.replace(
        stage.settings, runner=dataclasses.replace(stage.settings.runner, max_attempts=1)
    )
    text = source(python, "lab_counting", args=WITHOUT_TOOL)
    rows = counting_rows(python)
    hows = ["raise in setup", "raise in reward", "nan", "infinite", "long answer", "print 100 MB", ""]
    await play(stage, text, [misbehaving(rows, how) for how in hows])
    groups = {one.session_id: hows[int(one.group_id[1:])] for one in await stage.said(SessionStarted)}
    ends = {groups[one.session_id]: one for one in await stage.said(SessionFinished)}
    for how, said in {"raise in setup": "KeyError", "raise in reward": "ValueError: a bug of the reward"}.items():
        assert ends[how].outcome is Outcome.infra_failure
        assert said in ends[how].reason
    assert {ends[how].outcome for how in hows[2:]} == {Outcome.completed}
    failed = {groups[one.session_id]: one.cause for one in await stage.said(RewardFailed)}
    assert failed.keys() == {"nan", "infinite"}
    assert "'right': nan" in failed["nan"]
    rewards = {groups[one.session_id]: one.value for one in await stage.said(RewardAssigned)}
    assert rewards.keys() == {"long answer", "print 100 MB", ""}


WITHOUT_TOOL = {"taskset": {"tooled": False}}
"""Spares the server of the tool, which imports verifiers as well."""


class Bench:
    """An environment, and an endpoint in place of the gateway."""

    def __init__(self, text: str, url: str) -> None:
        self.source = task_source(text)
        self.url = url

    async def play(self, row: Mapping[str, Any]) -> Any:
        session = AgentSession(base_url=self.url, api_key=SECRET, model="m", task=row, tools=(), max_turns=9, call=None)  # type: ignore[arg-type]
        return await self.source.agent.run(session)  # type: ignore[attr-defined]


@pytest.fixture
async def bench(python: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setenv("TEST_MARK", MARK)
    async with open_bench(source(python, "lab_counting") + ",TEST_MARK", counting) as bench:
        yield bench


@pytest.fixture
async def small_bench(python: Path) -> AsyncIterator[Bench]:
    """One without the tool."""
    async with open_bench(source(python, "lab_counting", args=WITHOUT_TOOL), lambda prompt: "words 0") as bench:
        yield bench


@contextlib.asynccontextmanager
async def open_bench(text: str, answers: Callable[[str], str]) -> AsyncIterator[Bench]:
    async with scripted_openai(answers) as url:
        bench = Bench(text, url)
        yield bench
        await bench.source.processes.stop()  # type: ignore[attr-defined]
        task_source.cache_clear()


def marked() -> dict[int, tuple[str, str]]:
    """Return command line and variables of all processes that an environment of this test started."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_text(errors="replace")
            if f"TEST_MARK={MARK}\0" in variables:
                found[int(entry.name)] = ((entry / "cmdline").read_text(), variables)
    return {pid: said for pid, said in found.items() if pid != os.getpid()}


def first_rows_of(bench: Bench) -> list[Mapping[str, Any]]:
    """Return the tasks of its environment."""
    return list(bench.source.tasks(0))


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.05)


async def test_a_killed_driver_fails_its_episodes_by_name_and_the_next_episode_starts_another(
    small_bench: Bench, python: Path
) -> None:
    rows = counting_rows(python)
    waiting = asyncio.create_task(small_bench.play(misbehaving(rows, "hang")))
    with pytest.raises(ProcessDied, match="status 137"):
        await small_bench.play(misbehaving(rows, "die"))
    with pytest.raises(ProcessDied, match="a print of the environment"):
        await waiting
    assert (await small_bench.play(rows[0])).components["right"] in (0.0, 2.0)
    with pytest.raises((ProcessDied, EpisodeFailed), match=r"SystemExit|status 3"):
        await small_bench.play(misbehaving(rows, "leave"))


@pytest.mark.long
async def test_an_episode_is_cancelled_at_the_deadline_and_an_environment_that_blocks_is_killed(
    bench: Bench, python: Path
) -> None:
    rows = counting_rows(python)
    good = await bench.play(rows[0])
    process = await bench.source.processes.current()  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bench.play(misbehaving(rows, "hang")), 3)
    assert await bench.source.processes.current() is process  # type: ignore[attr-defined]
    assert await bench.play(rows[0]) == good
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bench.play(misbehaving(rows, "block")), 3)
    assert process.dead
    assert await bench.play(rows[0]) == good


async def test_no_process_of_an_environment_has_the_key_and_none_is_left_behind(bench: Bench) -> None:
    rows = first_rows_of(bench)
    hanging = asyncio.create_task(bench.play(rows[0]))
    await until(lambda: any("tools" in command for command, _ in marked().values()) or hanging.done())
    assert len(marked()) > 2, "supervisor, driver, and the server of the tool"
    assert not [said for said in marked().values() if SECRET in "".join(said)]
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    await bench.source.processes.stop()  # type: ignore[attr-defined]
    await until(lambda: not marked())


RUNNER = """
import asyncio, json, sys
from turnlog.environments import AgentSession, task_source
source, row, url = task_source(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
session = AgentSession(base_url=url, api_key="k", model="m", task=row, tools=(), max_turns=9, call=None)
asyncio.run(source.agent.run(session))
"""


@pytest.mark.long
async def test_the_environment_ends_with_its_runner_even_if_that_is_killed(bench: Bench, python: Path) -> None:
    rows = counting_rows(python)
    text = source(python, "lab_counting") + ",TEST_MARK"
    row = json.dumps(misbehaving(rows, "block after"))
    runner = await asyncio.create_subprocess_exec(sys.executable, "-c", RUNNER, text, row, bench.url)
    mine = lambda: {pid for pid in marked() if pid != runner.pid}  # noqa: E731
    await until(lambda: len(mine()) > 2 or runner.returncode is not None)
    runner.kill()
    await runner.wait()
    await until(lambda: not mine(), 30)


@each("options, said", [
    ({"python": "/no/such/python"}, "cannot be executed"),
    ({"python": sys.executable}, "No module named 'verifiers'"),
    ({"env": "no-such-environment"}, "not found"),
])  # fmt: skip
def test_a_source_that_cannot_start_says_why_before_any_rollout(
    python: Path, options: dict[str, Any], said: str
) -> None:
    chosen = {"env": "lab_counting", "python": str(python), **options}
    text = source(Path(chosen.pop("python")), chosen.pop("env"), **chosen)
    with pytest.raises(NotStarted, match=said):
        first_rows(text, 1)


def test_options_that_an_environment_cannot_have_are_refused_by_name(python: Path) -> None:
    """One driver is asked for all."""
    refused: dict[str, dict[str, Any]] = {
        "no `__all__`|exports no": {"env": "json"},
        "no_such_option": {"args": {"taskset": {"no_such_option": 1}}},
        "executes what the model writes": {"args": {"agent": {"harness": {"id": "bash"}}}},
        "has no splits": {"env": "textarena", "args": {"taskset": {"game": "Hangman-v0"}}, "split": "eval"},
    }
    texts = [source(python, **{"env": "lab_counting", **options}) for options in refused.values()]
    asked: list[EnvironmentOptions] = [task_source(text).options for text in texts]  # type: ignore[attr-defined]
    command, variables = asked[0].command(), asked[0].environ()
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.write(b"".join(one.opening() for one in asked))
        driver.stdin.flush()
        answers = [json.loads(driver.stdout.readline()) for _ in asked]
    assert [answer["op"] for answer in answers] == ["failed"] * len(refused)
    for answer, said in zip(answers, refused, strict=True):
        assert re.search(said, answer["error"]["message"]), answer
