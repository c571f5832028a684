"""The tool openenv, through a worker, at servers that break the protocol: each is an outcome of its own."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

from tests.each import each
from tests.environments.openenv_servers import Answers, broken, free_port
from turnlog.sandbox_settings import EgressSettings
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolCallCompleted, ToolCallRequested, ToolStatus

SPEC = SandboxSpec(backend="subprocess", limits=SandboxLimits(wall_s=2.0))
NUMBERS = itertools.count()
STEP = json.dumps({"type": "observation", "data": {"observation": {"n": 1}, "reward": 0.5, "done": False}})


def allow(house: Any, *rules: str, **more: Any) -> None:
    """Workers of the house may reach this, on their own machine."""
    house.settings = dataclasses.replace(house.settings, egress=EgressSettings(allow=rules, tls="refuse", **more))


def local(house: Any, url: str) -> None:
    """Workers of the house may reach a server of this machine."""
    allow(house, f"GET {url}/*", private_hosts=(url.removeprefix("http://"),))


def ask(house: Any, seq: int, session: str, *, spec: SandboxSpec = SPEC, **arguments: Any) -> ToolCallRequested:
    """A call of the tool."""
    return house.call(
        f"{session}{seq}", seq, session=session, tool="openenv", arguments=json.dumps(arguments).encode(), sandbox=spec
    )


def another() -> str:
    """A session's name."""
    return f"s{next(NUMBERS)}"


def scripted(*said: str | bytes | tuple[str, ...] | None) -> Answers:
    """One answer after another."""
    left = list(said)
    return lambda message: left.pop(0)


async def outcomes(house: Any, answers: Answers, *calls: dict[str, Any], health: str = "") -> list[ToolCallCompleted]:
    """What a reset and these calls come to, at a server with these answers."""
    async with broken(answers, **({"health": health} if health else {})) as url:
        local(house, url)
        session = another()
        async with house.worker():
            first = await house.answer(ask(house, 0, session, reset=True, server=url))
            return [first, *[await house.answer(ask(house, n, session, **call)) for n, call in enumerate(calls, 1)]]


def how(answer: ToolCallCompleted) -> tuple[ToolStatus, str]:
    """Status and reason."""
    return answer.status, answer.reason


async def test_an_episode_is_answered_in_the_format_of_env_step(house: Any) -> None:
    asked: list[Any] = []

    def answers(message: str) -> str:
        asked.append(json.loads(message))
        return STEP

    first, second = await outcomes(house, answers, {"action": {"move": 1}})
    assert first.output == second.output
    assert json.loads(second.output) == {
        "observation": {"n": 1}, "reward": 0.5, "terminated": False, "truncated": False, "info": {},
    }  # fmt: skip
    assert asked == [{"type": "reset", "data": {}}, {"type": "step", "data": {"move": 1}}, {"type": "close"}]


@each(
    ("name", "said", "reason", "says"),
    [
        ("no JSON", "<html>", "environment_garbage", "not JSON"),
        ("half of it", STEP[:40], "environment_garbage", "not JSON"),
        ("NaN", STEP.replace("0.5", "NaN"), "environment_garbage", "NaN"),
        ("infinite", STEP.replace("0.5", "1e999"), "environment_garbage", "no finite number"),
        ("a reward of text", STEP.replace("0.5", '"much"'), "environment_garbage", "no finite number"),
        ("no observation", '{"type": "observation", "data": {}}', "environment_garbage", "no observation"),
        ("done of text", STEP.replace("false", '"no"'), "environment_garbage", "true or false"),
        ("another type", '{"type": "state", "data": {}}', "environment_garbage", "no message of type"),
        ("a list", "[]", "environment_garbage", "no message of type"),
        ("deep", "[" * 100_000, "environment_garbage", "not JSON"),
        ("bytes", b"\xff\xfe", "environment_garbage", "not JSON"),
        ("the end", "", "environment_lost", "ended the connection"),
    ],
)
async def test_a_wrong_answer_to_a_step_is_not_the_agents_fault_and_ends_the_environment(
    house: Any, name: str, said: str | bytes, reason: str, says: str
) -> None:
    _, wrong, after = await outcomes(house, scripted(STEP, said), {"action": {}}, {"action": {}})
    assert how(wrong) == how(after) == (ToolStatus.infra_error, reason), name
    assert says in wrong.output.decode()


async def test_an_error_of_the_environment_is_the_models_to_read_and_the_episode_goes_on(house: Any) -> None:
    error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [{"loc": ["n"], "msg": "too large"}]}
    said = json.dumps({"type": "error", "data": error})
    _, refused, after = await outcomes(house, scripted(STEP, said, STEP), {"action": {}}, {"action": {}})
    assert (how(refused), refused.output) == ((ToolStatus.tool_error, ""), b"Invalid message\nn: too large\n")
    assert after.status is ToolStatus.ok


async def test_a_second_answer_to_one_message_is_not_taken_for_the_next(house: Any) -> None:
    _, _, out_of_turn = await outcomes(house, scripted(STEP, (STEP, STEP), STEP), {"action": {}}, {"action": {}})
    assert how(out_of_turn) == (ToolStatus.infra_error, "environment_garbage")


async def test_a_step_that_takes_too_long_is_the_actions_doing_if_the_server_serves_others(house: Any) -> None:
    _, late, after, again = await outcomes(
        house, scripted(STEP, None, STEP), {"action": {}}, {"action": {}}, {"reset": True}
    )
    assert how(late) == (ToolStatus.timeout, "wall_s")
    assert (after.status, again.status) == (ToolStatus.tool_error, ToolStatus.ok)
    assert b"took longer than 2 s" in after.output


async def test_a_server_that_serves_nobody_any_more_is_silent(house: Any) -> None:
    _, late = await outcomes(house, scripted(STEP, None), {"action": {}}, health='{"status": "unhealthy"}')
    assert how(late) == (ToolStatus.infra_error, "environment_silent")


async def test_a_reset_begins_again_on_another_connection_and_is_bounded(house: Any) -> None:
    full = json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1/1 sessions active"}})
    (served,) = await outcomes(house, scripted("", full, full, STEP))
    assert served.status is ToolStatus.ok
    async with broken(lambda message: full) as url, house.worker(instance="sandbox-1"):
        refused = await house.answer(ask(house, 0, another(), reset=True, server=url))
    assert how(refused) == (ToolStatus.infra_error, "environment_not_allowed")  # its port is another


async def test_a_server_that_stays_full_is_said_to_be_full(house: Any) -> None:
    full = json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1/1 sessions active"}})
    (refused,) = await outcomes(house, lambda message: full)
    assert how(refused) == (ToolStatus.infra_error, "environment_full")
    assert b"1/1 sessions active" in refused.output


@each(
    ("egress", "reason", "says"),
    [
        (EgressSettings(), "environment_not_allowed", "[egress] allow of this worker names nothing"),
        (EgressSettings(allow=("GET http://other/*",)), "environment_not_allowed", "no rule grants it"),
        (EgressSettings(allow=("* http://127.0.0.1:*/*",)), "environment_not_allowed", "private_hosts"),
        (EgressSettings(allow=("* http://127.0.0.1:*/*",), mode="replay"), "environment_not_allowed", "replay"),
    ],
)
async def test_a_server_that_egress_does_not_grant_is_named_with_the_setting(
    house: Any, egress: EgressSettings, reason: str, says: str
) -> None:
    house.settings = dataclasses.replace(house.settings, egress=egress)
    async with house.worker():
        refused = await house.answer(ask(house, 0, another(), reset=True, server=f"http://127.0.0.1:{free_port()}"))
    assert how(refused) == (ToolStatus.infra_error, reason)
    assert says in refused.output.decode()


async def test_a_server_that_is_not_there_is_unreachable(house: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    local(house, url)
    async with house.worker():
        refused = await house.answer(ask(house, 0, another(), reset=True, server=url))
    assert how(refused) == (ToolStatus.infra_error, "environment_unreachable")


@each(
    ("arguments", "says"),
    [
        ({}, '"action", or "reset": true'),
        ({"reset": True, "action": {}}, 'takes no "action"'),
        ({"action": {}, "seed": 3}, '"seed" goes with "reset"'),
        ({"action": [1]}, "must be an object"),
        ({"reset": True, "server": 3}, "server"),
        ({"action": {}}, "reset first"),
        ({"reset": True}, "the first reset names one"),
    ],
)
async def test_a_call_that_is_no_call_says_what_is_legal(house: Any, arguments: dict[str, Any], says: str) -> None:
    async with house.worker():
        refused = await house.answer(ask(house, 0, another(), **arguments))
    assert refused.status in (ToolStatus.refused, ToolStatus.tool_error)
    assert says in refused.output.decode()
