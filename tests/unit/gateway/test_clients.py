"""Frameworks themselves at the gateway: the table of docs/frameworks.md. Each asks two questions in one conversation,
the first of which takes a call; what it sends back continues the turns that it was given, token for token."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.agent_clis import program
from tests.frameworks.clients import ANSWERS, CLIENTS, Client, command, looks
from tests.unit.gateway.conftest import model_in, settings_of
from tests.unit.gateway.test_anthropic_messages import THINKS
from turnlog.schemas.events import Event
from turnlog.schemas.types import int32s
from turnlog.settings import Settings

pytestmark = pytest.mark.long

ROOM = 16_000
"""Tokens."""
OPENED = {"sampling": {"temperature": 1.0, "max_new_tokens": 1000}, "limits": {"max_context_tokens": ROOM}}
TEMPLATE = "{%- for tool in tools or [] -%}<|im_start|>{{ tool | tojson }}<|im_end|>{% endfor -%}" + THINKS


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's, with more room, reasoning, and tools in the prompt as they were sent."""
    return model_in(tmp_path_factory.mktemp("model"), ROOM, TEMPLATE)


@pytest.fixture
def settings(tmp_path: Path, model_folder: Path) -> Settings:
    """A window that holds it."""
    return settings_of(model_folder, tmp_path, context=ROOM)


async def ended(words: Sequence[str | Path], home: Path, **environment: str) -> tuple[int | None, str]:
    """Run a program to its end: its status, and all that it wrote."""
    process = await asyncio.create_subprocess_exec(
        *words, cwd=home, env={"HOME": str(home), "PATH": os.environ["PATH"], **environment},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, said.decode()


async def driven(rig: Any, session: Any, name: str, home: Path, **environment: str) -> tuple[int | None, str]:
    """The same for the client's driver."""
    address = {"OPENAI_BASE_URL": f"{rig.url}/v1", "OPENAI_API_KEY": session["agent_token"]}
    return await ended(command(name), home, **address, **environment)


async def of_session(rig: Any, session: Any, name: str) -> list[Event]:
    return [one for one in await rig.written(name) if one.session_id == session["session_id"]]


async def does_its_task(
    rig: Any, session: Any, name: str, home: Path, api: str = "chat", changed: Client | None = None
) -> None:
    """The client, or it `changed`, runs the call with the arguments that it was told, and reports the answers; the
    turns of its session stand to each other as it says, and the engine is asked to go on with what was recorded."""
    client, engine = changed or CLIENTS[name], rig.engines["e0"]
    asked = len(engine.requests)
    for text in client.says:
        rig.script.says(text)
    status, said = await driven(rig, session, name, home, TOOL=client.tool, API=api, TOOL_CHOICE="auto")
    assert status == 0, said
    [told] = [json.loads(line) for line in said.splitlines() if line.startswith('{"calls"')]
    assert told["calls"] == [[*client.call]]
    assert all(answer.endswith(own) for answer, own in zip(told["answers"], ANSWERS, strict=True)), told
    snapshots = await of_session(rig, session, "TokenSnapshot")
    assert tuple(one.boundary.value for one in snapshots) == client.boundaries
    held: list[int] = []
    for request, one in zip(engine.requests[asked:], snapshots, strict=True):
        assert one.boundary.value != "append" or one.base_len == len(held)
        prompt = held[: one.base_len] + int32s(one.delta_ids).tolist()
        assert list(request.input_ids) == prompt
        held = prompt + int32s(one.output_ids).tolist()


@pytest.mark.parametrize(("name", "api"), [(name, api) for name, client in CLIENTS.items() for api in client.apis])
async def test_a_client_continues_its_turns_over_two_questions_and_a_call(
    rig: Any, tmp_path: Path, name: str, api: str
) -> None:
    await does_its_task(rig, await rig.open(**OPENED), name, tmp_path, api)


async def test_agno_and_langgraph_share_a_gateway_though_they_write_one_tool_with_its_keys_in_other_orders(
    rig: Any, tmp_path: Path
) -> None:
    for number, name in enumerate(("agno", "LangGraph", "agno")):
        says = (looks('{"city":"Oslo"}', "weather"), *ANSWERS)
        changed = dataclasses.replace(CLIENTS[name], tool="weather", says=says, call=("Oslo",))
        await does_its_task(rig, await rig.open(f"rollout-{number}", **OPENED), name, tmp_path, changed=changed)
    offers = [(one.tools_sha256, one.tools) for one in await rig.written("TurnCompleted")]
    assert (len({sha256 for sha256, _ in offers}), len(offers)) == (1, 9)
    prompts = [rig.tokens.decode(request.input_ids) for request in rig.engines["e0"].requests]
    assert len({prompt.partition("system")[0] for prompt in prompts}) == 2


async def test_smolagents_as_it_comes_is_refused_in_a_session_that_trains(rig: Any, tmp_path: Path) -> None:
    session = await rig.open(**OPENED)
    status, said = await driven(rig, session, "smolagents", tmp_path, TOOL="look_up", TOOL_CHOICE="required")
    assert (status, "tool_choice would constrain sampling" in said) == (1, True), said
    assert await rig.written("TurnCompleted") == []


async def test_gemini_cli_asks_in_an_api_of_its_own_and_shows_which_are_served(rig: Any, tmp_path: Path) -> None:
    session = await rig.open(**OPENED)
    (tmp_path / ".gemini").mkdir()
    chosen = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": False}}
    (tmp_path / ".gemini/settings.json").write_text(json.dumps(chosen))
    status, said = await ended(
        (program("gemini-cli"), "-m", "policy", "-p", "Mend it."), tmp_path, TMPDIR=str(tmp_path),
        GEMINI_CLI_TRUST_WORKSPACE="true", GOOGLE_GEMINI_BASE_URL=rig.url, GEMINI_API_KEY=session["agent_token"],
    )  # fmt: skip
    assert status == 1
    assert "/v1beta/models/policy:streamGenerateContent is not served. Agents speak OpenAI's chat" in said
    assert "use another client, or a translating proxy" in said
    assert await rig.written("TurnCompleted") == []
