"""Agents of docs/frameworks.md, as they stand there: several turns, tools in a real sandbox. For an environment of
frameworks.lock; tests/integration/test_frameworks.py runs it there."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.offers import offering
from tests.integration.conftest import Stage, stage  # noqa: F401
from tests.integration.test_command_agents import working
from turnlog.environments import FunctionAgent, FunctionVerifier, Recipe, Verdict
from turnlog.plugins.recipes.calc import RECIPE as CALC
from turnlog.schemas.events import (
    Boundary,
    Outcome,
    RewardAssigned,
    SandboxSpec,
    TokenSnapshot,
    ToolCallCompleted,
    ToolStatus,
)

ROOM = 16_000
"""Tokens."""
PAGE = Path(__file__).parents[2] / "docs/frameworks.md"
BLOCK = re.compile(r"^## (.+?)\n.*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
AGENTS = dict(BLOCK.findall(PAGE.read_text()))


class Framework(Recipe):
    name = "framework"
    sandbox = SandboxSpec(durable_workspace=True)
    verifier = FunctionVerifier("called", "1", lambda episode: Verdict(float("8" in str(episode.messages[-1]))))

    def __init__(self, agent: FunctionAgent) -> None:
        self.agent = agent


OFFERED = types.SimpleNamespace()
"""`recipe`: what the installed package offers."""


@pytest.fixture(scope="module")
def calc_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    CALC.warm_start.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CALC.warm_start.model.config() | {"max_position_embeddings": ROOM}))
    return folder


@pytest.fixture
def acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Have the recipe offered, with the agent of this heading."""

    def bring(heading: str) -> None:
        module: dict[str, Any] = {"__name__": "page"}
        exec(compile(AGENTS[heading], PAGE, "exec"), module)
        OFFERED.recipe = Framework(FunctionAgent(heading, "1", module["acts"]))

    with offering(tmp_path, monkeypatch, "framework", {"framework": f"{__name__}:OFFERED.recipe"}):
        yield bring


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


WRITES, ADDS = "open('n', 'w').write('3'); print('written')", "print(int(open('n').read()) + 5)"
BY_PYTHON = (called("python", code=WRITES), called("python", code=ADDS), "8")
BY_BASH = (
    called("bash", command="echo 3 >n"), called("bash", command="echo $(($(cat n) + 5))"),
    called("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat n; echo 8"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("heading", "says"),
    [("OpenAI Agents SDK", BY_PYTHON), ("Pydantic AI", BY_PYTHON), ("mini-swe-agent", BY_BASH)],
    ids=["openai-agents", "pydantic-ai", "mini-swe-agent"],
)
async def test_an_agent_of_the_page_does_a_task_of_three_turns_with_tools(
    stage: Stage,  # noqa: F811
    acts: Callable[[str], None],
    heading: str,
    says: tuple[str, ...],
) -> None:
    acts(heading)
    stage.answers = lambda request, count: None
    stage.policy = lambda prompt: says[prompt.count("<|im_start|>assistant") - 1]
    stage.engine.context = ROOM
    stage.settings = dataclasses.replace(
        stage.settings,
        engine=dataclasses.replace(stage.settings.engine, context=ROOM),
        runner=dataclasses.replace(stage.settings.runner, tool_deadline_s=60.0),
    )
    await stage.request(recipe="framework", new_tokens=1000, max_turns=5, max_context_tokens=ROOM, deadline_s=120.0)
    async with working(stage), stage.gateway(), stage.running():
        [finish] = await stage.finished(1, seconds=150)
    assert (finish.outcome, finish.final, finish.reason) == (Outcome.completed, True, "")
    [reward], calls = await stage.said(RewardAssigned), await stage.said(ToolCallCompleted)
    assert reward.value == 1.0
    assert {call.status for call in calls} == {ToolStatus.ok}
    assert calls[1].output == b"8\n"
    assert [one.boundary for one in await stage.said(TokenSnapshot)] == [
        Boundary.root, Boundary.append, Boundary.append,
    ]  # fmt: skip
