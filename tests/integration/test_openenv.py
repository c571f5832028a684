"""OpenEnv as upstream has it: its servers, its client beside ours, and kills of both sides."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.environments.openenv_servers import UpstreamServer, free_port, guessing, serve, upstream_python
from tests.unit.sandbox.conftest import House, house
from tests.unit.sandbox.test_openenv_tool import ask, how, local
from turnlog.plugins.openenv.client import (
    DirectNetwork,
    EnvironmentFull,
    EnvironmentRaised,
    OpenEnvServer,
    OpenEnvSession,
    ServerUnreachable,
)
from turnlog.schemas.events import ToolCallCompleted, ToolStatus
from turnlog.schemas.events.tools import SESSION_OVER
from turnlog.schemas.ids import digest

__all__ = ["house"]
CLIENT = Path(__file__).parents[1] / "environments/upstream_client.py"
EPISODES = 24


@pytest.fixture(scope="module")
def echo_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment that upstream's `openenv init` writes: it echoes, and rewards length."""
    folder = tmp_path_factory.mktemp("echo")
    init = upstream_python().with_name("openenv")
    subprocess.run([init, "init", "echo_env", "--output-dir", folder], check=True, capture_output=True)
    return folder / "echo_env"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guess() -> AsyncIterator[UpstreamServer]:
    """A server of the guessing game, at which every session has a game of its own."""
    async with guessing() as server:
        yield server


def played_upstream(url: str, episodes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What upstream's own client gets."""
    done = subprocess.run(
        [upstream_python(), CLIENT, url], input=json.dumps(episodes), capture_output=True, text=True, check=True
    )
    played: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return played


async def played_here(house: House, url: str, episode: Mapping[str, Any], session: str) -> list[dict[str, Any]]:
    """What a session of turnlog gets, in the form of upstream's client."""
    reset = dict(episode["reset"])
    seed = {"seed": reset.pop("seed")} if "seed" in reset else {}
    answers = [await house.answer(ask(house, 0, session, reset=True, server=url, options=reset, **seed))]
    for number, action in enumerate(episode["actions"], 1):
        if told(answers[-1])["done"]:
            break
        answers.append(await house.answer(ask(house, number, session, action=action)))
    over = house.cancelled(answers[-1].call_id, session=session)
    await house.ask(dataclasses.replace(over, event_id=digest("over", session), reason=SESSION_OVER))
    return [told(answer) for answer in answers]


def told(answer: ToolCallCompleted) -> dict[str, Any]:
    """An answer of the tool, as upstream's client has it."""
    assert answer.status is ToolStatus.ok, answer
    said = json.loads(answer.output)
    return {
        "observation": said["observation"], "reward": said["reward"],
        "done": said["terminated"] or said["truncated"], "metadata": said["info"],
    }  # fmt: skip


async def same_on_both_sides(house: House, url: str, episodes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Play the episodes by both, and return what either got."""
    theirs = await asyncio.to_thread(played_upstream, url, episodes)
    local(house, url)
    async with house.worker():
        ours = [await played_here(house, url, episode, f"e{number}") for number, episode in enumerate(episodes)]
    assert ours == theirs
    return ours


async def test_scripted_actions_give_the_same_as_by_upstreams_client(house: House, guess: UpstreamServer) -> None:
    chosen = random.Random(7)
    episodes = [
        {"reset": {"seed": seed, "most": 4}, "actions": [{"number": chosen.randrange(100)} for _ in range(4)]}
        for seed in range(EPISODES - 1)
    ]
    episodes.append({"reset": {"seed": 3}, "actions": [{"number": n} for n in (50, 25, 12, 37, 31, 28, 30, 29)]})
    ours = await same_on_both_sides(house, guess.url, episodes)
    assert len({json.dumps(episode) for episode in ours}) == EPISODES
    assert sum(answer["done"] for episode in ours for answer in episode) == EPISODES


async def test_the_environment_that_upstream_ships_gives_the_same(house: House, echo_package: Path) -> None:
    chosen = random.Random(8)
    episodes = [
        {
            "reset": {"seed": seed, "episode_id": f"e{seed}"},
            "actions": [{"message": "ü" * chosen.randrange(20)} for _ in range(3)],
        }
        for seed in range(EPISODES)
    ]
    port = free_port()
    command = (upstream_python(), "-m", "server.app", "--host", "127.0.0.1", "--port", str(port))
    async with serve(*command, port=port, cwd=echo_package) as server:
        await same_on_both_sides(house, server.url, episodes)


async def test_the_http_endpoints_are_spoken(guess: UpstreamServer) -> None:
    network = DirectNetwork()
    server = OpenEnvServer(guess.url, network)
    schema = await server.schema()
    assert schema["action"]["properties"]["number"]["maximum"] == 99
    first = await server.reset({"seed": 1})
    step = await server.step({"number": 3}, request_id="c1")
    with pytest.raises(EnvironmentRaised, match="422"):
        await server.step({"number": 300})
    with pytest.raises(EnvironmentRaised):
        await server.mcp("tools/list", {})
    assert (first.observation["hint"], step.observation["guesses"]) == ("Guess a number from 0 to 99.", 1)
    assert await server.state() is not None
    await network.close()


async def test_a_connection_serves_reset_step_and_state_and_gives_its_place_back() -> None:
    async with guessing(sessions=1) as server:
        network = DirectNetwork()
        first = await OpenEnvSession.connect(server.url, network)
        await first.reset({"seed": 1}, timeout_s=10)
        await first.step({"number": 1}, timeout_s=10)
        assert (await first.state(timeout_s=10))["step_count"] == 1
        second = await OpenEnvSession.connect(server.url, network)
        with pytest.raises(EnvironmentFull, match="1/1"):
            await second.reset({}, timeout_s=10)
        await second.close()
        await first.close()
        third = await OpenEnvSession.connect(server.url, network)
        assert (await third.reset({"seed": 1}, timeout_s=10)).observation["guesses"] == 0
        await server.kill()
        with pytest.raises(ServerUnreachable):
            await OpenEnvServer(server.url, network).health()
        await third.close()
        await network.close()


async def test_sessions_at_once_do_not_mix(house: House, guess: UpstreamServer) -> None:
    local(house, guess.url)
    async with house.worker():
        await house.ask(*(ask(house, 0, f"s{n}", reset=True, server=guess.url, seed=n) for n in range(16)))
        await house.completed(16)
        await house.ask(*(ask(house, k, f"s{n}", action={"number": 3}) for k in (1, 2) for n in range(16)))
        answers = {answer.call_id: told(answer) for answer in await house.completed(48)}
    for number in range(16):
        wanted = random.Random(number).randrange(100)
        first, second = (answers[f"s{number}{step}"]["observation"] for step in (1, 2))
        assert first["hint"] == ("right" if wanted == 3 else "higher" if wanted > 3 else "lower")
        assert (first["guesses"], second["guesses"]) == (1, 2)


@pytest.mark.parametrize("stroke", ["killed", "stopped"])
async def test_a_server_that_dies_or_hangs_under_a_step_ends_the_call_by_name(house: House, stroke: str) -> None:
    async with guessing() as server:
        local(house, server.url)
        async with house.worker():
            await house.answer(ask(house, 0, "s", reset=True, server=server.url, seed=1))
            waiting = asyncio.create_task(house.answer(ask(house, 1, "s", action={"number": 1, "harm": "sleep:9"})))
            while not any(start.call_id == "s1" for start in await house.starts()):
                await house.log.broker.changed(5.0)
            if stroke == "killed":
                await server.kill()
            else:
                server.stop()
            ended = await waiting
            after = await house.answer(ask(house, 2, "s", action={"number": 1}))
    reason = "environment_lost" if stroke == "killed" else "environment_silent"
    assert how(ended) == how(after) == (ToolStatus.infra_error, reason)


async def test_a_step_after_the_workers_end_is_not_sent_and_a_repeated_one_is_read_from_the_log(
    house: House, guess: UpstreamServer
) -> None:
    """The environment went with its connection: nobody takes the next step in a new one."""
    local(house, guess.url)
    async with house.worker():
        await house.answer(ask(house, 0, "s", reset=True, server=guess.url, seed=5))
        step = await house.answer(ask(house, 1, "s", action={"number": 1}))
    async with house.worker(instance="sandbox-1"):
        await house.ask(ask(house, 1, "s", action={"number": 1}))
        repeated = (await house.completed(3))[-1]
        lost = await house.answer(ask(house, 2, "s", action={"number": 1}))
    assert (repeated.cached, repeated.output) == (True, step.output)
    assert how(lost) == (ToolStatus.infra_error, "environment_lost")


async def test_a_step_that_a_dead_worker_had_begun_is_not_taken_again(house: House, guess: UpstreamServer) -> None:
    local(house, guess.url)
    async with house.worker():
        await house.answer(ask(house, 0, "s", reset=True, server=guess.url, seed=5))
    await house.ask(house.started("s1", 1))
    async with house.worker(instance="sandbox-1"):
        step = await house.answer(ask(house, 1, "s", action={"number": 1}))
    assert how(step) == (ToolStatus.infra_error, "environment_lost")
    assert step.attempt == 2


async def test_a_reset_that_a_dead_worker_had_begun_is_made_again(house: House, guess: UpstreamServer) -> None:
    """It begins with an environment of its own, so nothing is repeated in an old one."""
    local(house, guess.url)
    await house.ask(house.started("s0", 1))
    async with house.worker():
        first = await house.answer(ask(house, 0, "s", reset=True, server=guess.url, seed=5))
        step = await house.answer(ask(house, 1, "s", action={"number": 1}))
    assert (first.attempt, told(step)["observation"]["guesses"]) == (2, 1)


async def test_an_environment_that_raises_or_refuses_leaves_the_episode_to_the_model(
    house: House, guess: UpstreamServer
) -> None:
    local(house, guess.url)
    async with house.worker():
        first = await house.answer(ask(house, 0, "s", reset=True, server=guess.url, seed=5, describe=True))
        raised = await house.answer(ask(house, 1, "s", action={"harm": "raise"}))
        refused = await house.answer(ask(house, 2, "s", action={"number": 100}))
        step = await house.answer(ask(house, 3, "s", action={"number": 1}))
        broken_reset = await house.answer(ask(house, 0, "t", reset=True, server=guess.url, options={"harm": "raise"}))
    assert json.loads(first.output)["action_schema"]["title"] == "Guess"
    assert how(raised) == how(refused) == (ToolStatus.tool_error, "")
    assert b"less than or equal to 99" in refused.output
    assert told(step)["observation"]["guesses"] == 1
    assert how(broken_reset) == (ToolStatus.infra_error, "environment_error")
