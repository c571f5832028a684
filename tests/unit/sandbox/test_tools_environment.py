"""env_step: what its driver makes of environments, and an episode in a real sandbox's interpreter."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.protocol import Execution, Sandbox, Shape
from turnlog.sandbox_workers.tools import Prepared, prepared
from turnlog.sandbox_workers.tools.environment_driver import Stage, answer, as_json
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus

LIMITS = SandboxLimits(wall_s=20.0)
SPEC = SandboxSpec(backend="subprocess", durable_workspace=True)
COUNTER = '''
class Counter:
    """Ends at 3, cut off after 4 steps."""

    def __init__(self):
        self.closed = False

    def reset(self, *, seed=None, options=None):
        print("a line that is no answer")
        self.count, self.steps = (options or {}).get("start", 0), 0
        return self.count, {"seed": seed}

    def step(self, action):
        self.count, self.steps = self.count + action, self.steps + 1
        return self.count, float(action), self.count == 3, self.steps == 4, {"steps": self.steps}


def loud():
    import os
    os.write(1, b"from below Python\\n")
    return Counter()


class Leaving(Counter):
    def step(self, action):
        raise SystemExit("gone")
'''


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module `own_games`, for the driver in this process."""
    (tmp_path / "own_games.py").write_text(COUNTER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_games", raising=False)


def said(capsys: pytest.CaptureFixture[str], stage: Stage, **arguments: Any) -> dict[str, Any]:
    """What the driver prints last."""
    answer(json.dumps(arguments), stage)
    line: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return line


@pytest.mark.usefixtures("importable")
def test_an_episode_has_an_order_and_the_driver_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    assert "reset first" in said(capsys, stage, action=1)["error"]
    assert "the first reset names one" in said(capsys, stage, reset=True)["error"]
    begun = said(capsys, stage, reset=True, environment="own_games:Counter", seed=7)["answer"]
    assert begun == {"observation": 0, "reward": 0.0, "terminated": False, "truncated": False, "info": {"seed": 7}}
    assert said(capsys, stage, action=2)["answer"]["observation"] == 2
    assert "the environment here is own_games:Counter" in said(capsys, stage, action=1, environment="a:B")["error"]
    assert said(capsys, stage, action=1)["answer"]["terminated"] is True
    assert said(capsys, stage, action=1)["error"] == "the episode terminated: reset before the next action"
    assert said(capsys, stage, reset=True, options={"start": -9})["answer"]["observation"] == -9
    for _ in range(4):
        last = said(capsys, stage, action=0)["answer"]
    assert last["truncated"] is True
    assert "was truncated" in said(capsys, stage, action=1)["error"]


@pytest.mark.usefixtures("importable")
def test_what_the_environment_raises_is_shown_from_its_own_lines_on(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    said(capsys, stage, reset=True, environment="own_games:Counter")
    shown = said(capsys, stage, action="x")["error"]
    assert "self.count + action" in shown
    assert "environment_driver" not in shown
    assert said(capsys, stage, action=1)["answer"]["observation"] == 1
    said(capsys, stage, reset=True, environment="own_games:Leaving")
    assert "SystemExit: gone" in said(capsys, stage, action=1)["error"]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ("no_such_module:Game", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("own_games:Missing", "AttributeError"),
        ("json:dumps", "TypeError"),
        ("json:JSONEncoder", "json:JSONEncoder makes no environment: it needs reset and step"),
    ],
)
def test_an_environment_that_cannot_be_made_is_named(
    capsys: pytest.CaptureFixture[str], environment: str, text: str
) -> None:
    stage = Stage()
    assert text in said(capsys, stage, reset=True, environment=environment)["error"]
    assert "reset first" in said(capsys, stage, action=1)["error"]


def test_answers_of_another_shape_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    stage.environment = SimpleNamespace(reset=lambda: 3, step=lambda action: (1, 2.0, True, {}))
    stage.name = "old:Gym"
    assert "reset of old:Gym must answer (observation, info), got int" in said(capsys, stage, reset=True)["error"]
    stage.over = ""
    assert "must answer (observation, reward, terminated, truncated, info)" in said(capsys, stage, action=1)["error"]


def test_actions_go_through_the_action_space_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    space = SimpleNamespace(from_jsonable=lambda many: [np.asarray(one) for one in many])
    stage = Stage()
    stage.environment = SimpleNamespace(step=lambda a: (a * 2, a.sum(), np.bool_(False), False, {}), action_space=space)
    stage.over = ""
    done = said(capsys, stage, action=[1, 2])["answer"]
    assert (done["observation"], done["reward"], done["terminated"]) == ([2, 4], 3, False)


def test_values_of_environments_become_json() -> None:
    value = {
        "array": np.arange(4, dtype=np.float32).reshape(2, 2), "scalar": np.int64(3), "pair": (1, {2, 1}),
        "bytes": b"\xff", 7: None, "nan": math.nan, "low": -math.inf, "odd": object(),
    }  # fmt: skip
    found = as_json(value)
    json.dumps(found, allow_nan=False)
    assert found["array"] == [[0.0, 1.0], [2.0, 3.0]]
    assert (found["scalar"], found["pair"], found["bytes"], found["7"]) == (3, [1, [1, 2]], "\xff", None)
    assert (found["nan"], found["low"]) == ("NaN", "-Infinity")
    assert found["odd"].startswith("<object object")


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """With the module `games` in its workspace."""
    provider = await Subprocess.open(SandboxSettings(backend="subprocess", first_uid=281_000, cgroups="off"))
    sandbox = await provider.start(0, Shape(disk_bytes=8 << 20))
    await sandbox.write("games.py", COUNTER.encode())
    yield sandbox
    await sandbox.close()
    await provider.close()


async def step(sandbox: Sandbox, limits: SandboxLimits = LIMITS, **arguments: object) -> Execution:
    """One call."""
    call = prepared("env_step", json.dumps(arguments).encode(), SPEC, limits)
    assert isinstance(call, Prepared), call
    return await call.run(sandbox, limits, {})


async def test_an_episode_lives_in_the_sandbox_from_call_to_call(sandbox: Sandbox) -> None:
    early = await step(sandbox, action=1)
    assert (early.status, b"reset first" in early.output) == (ToolStatus.tool_error, True)
    begun = await step(sandbox, reset=True, environment="games:loud", seed=5)
    assert (begun.status, begun.exit_code) == (ToolStatus.ok, 0)
    assert json.loads(begun.output) == {
        "observation": 0, "reward": 0.0, "terminated": False, "truncated": False, "info": {"seed": 5},
    }  # fmt: skip
    counts = [json.loads((await step(sandbox, action=1)).output)["observation"] for _ in range(3)]
    assert counts == [1, 2, 3]
    late = await step(sandbox, action=1)
    assert (late.status, late.output) == (
        ToolStatus.tool_error,
        b"the episode terminated: reset before the next action\n",
    )


async def test_an_episode_goes_with_its_interpreter_and_the_answer_says_so(sandbox: Sandbox) -> None:
    await sandbox.write(
        "slow.py", b"from games import Counter\nclass Slow(Counter):\n  def step(self, a):\n    while 1: 1"
    )
    await step(sandbox, reset=True, environment="slow:Slow")
    ended = await step(sandbox, dataclasses.replace(LIMITS, wall_s=0.5), action=1)
    assert (ended.status, ended.reason) == (ToolStatus.timeout, "wall_s")
    after = await step(sandbox, action=1)
    assert (after.status, b"went with its interpreter" in after.output) == (ToolStatus.tool_error, True)


@pytest.mark.parametrize("said", ["[" * 20_000, "3", "", '{"answer": NaN}', '{"error": null}', "{" + "9" * 5000 + "}"])
async def test_an_agent_that_takes_the_drivers_place_gets_no_further_than_its_own_answer(
    sandbox: Sandbox, said: str
) -> None:
    """Its code shares the interpreter with the environment."""
    forged = "import sys, types\nmine = sys.modules['turnlog_environment'] = types.ModuleType('x')\nmine.STAGE = 0\n"
    forged += f"mine.answer = lambda *_: print({said!r})"
    call = prepared("python_session", json.dumps({"code": forged}).encode(), SPEC, LIMITS)
    assert isinstance(call, Prepared)
    await call.run(sandbox, LIMITS, {})
    done = await step(sandbox, action=1)
    assert (done.status, done.output) == (
        ToolStatus.tool_error,
        b"the environment's process ended its answer early or printed behind it\n",
    )
