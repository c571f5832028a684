"""What a session says of its surroundings: tools with versions, root, policy; stated once, equal for equal recipes."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.environments.episodes import SandboxCall, TaskRow
from turnlog.infra.environments.sources import BrokenRecipe
from turnlog.infra.environments.tasks import TaskSource
from turnlog.infra.environments.tools import UnknownTool, tool_declarations
from turnlog.infra.environments.workspaces import fetch_manifest, read
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import all_events
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.plugins.recipes.calc import RECIPE, Calc
from turnlog.producers.gateway_client import Environments, policy_sha256
from turnlog.producers.tool_calls import ToolCalls, ToolResults, first_workspace, json_of
from turnlog.sandbox_settings import EgressSettings, SandboxSettings
from turnlog.schemas.events import (
    Limits,
    RolloutRequested,
    Sampling,
    SandboxLimits,
    SandboxSpec,
    ToolCallCompleted,
    ToolStatus,
)
from turnlog.schemas.events.sessions import Environment
from turnlog.schemas.events.tasks import Purpose
from turnlog.schemas.ids import environment_digest
from turnlog.schemas.topics import TOOL_CALLS
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings

EGRESS = EgressSettings()
ROW = {"prompt": "?"}
REQUEST = RolloutRequested(
    event_id="e", run_id="local", task_id="t", group_id="g", rollout_id="o", rollout_index=0, group_size=2, draw=0,
    dataset="d", dataset_epoch=0, index=0, recipe="calc", purpose=Purpose.train, task=b"{}",
    sampling=Sampling(temperature=1.0, max_new_tokens=40),
    limits=Limits(max_turns=4, max_context_tokens=512, deadline_s=60.0),
    min_weight_version=0, pin_weight_version=None, floor=0,
)  # fmt: skip
ANSWER = ToolCallCompleted(
    event_id="e", run_id="local", group_id="g", session_id="s", floor=0, rollout_id="o", call_id="", call_seq=0,
    status=ToolStatus.ok, reason="", exit_code=0, output=b"", full_output=None, duration_s=0.1, queue_s=0.0,
    workspace=None, attempt=1, worker="w", cached=False,
)  # fmt: skip


class Coder(Calc):
    """A recipe that offers built-in tools as they are."""

    name = "coder"
    sandbox_tools = None  # type: ignore[assignment]

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Two of ours and one of its own."""
        own = {"type": "function", "function": {"name": "submit", "description": "", "parameters": {}}}
        return (*tool_declarations(["shell", "edit_file"]), own)


async def test_a_recipes_environment_names_tools_root_and_policy() -> None:
    found = await Environments(Settings()).of(RECIPE.task(ROW))
    assert (found.name, found.version, found.tools) == ("calc", "1", {"python": "1"})
    assert found.policy_sha256 == policy_sha256(RECIPE.sandbox, EGRESS)
    assert found.root_sha256 is not None
    assert len(found.root_sha256) == 64


async def test_built_in_tools_that_a_recipe_declares_are_its_tools_unless_it_says_otherwise() -> None:
    assert isinstance(Coder(), TaskSource)
    assert Coder().task(ROW).sandbox_tools == ("shell", "edit_file")
    assert RECIPE.task(ROW).sandbox_tools == ("python",)
    stated = Coder()
    stated.sandbox_tools = ("python", "browser")  # type: ignore[assignment]
    with pytest.raises(UnknownTool, match="no tool 'browser'"):
        await Environments(Settings()).of(stated.task(ROW))


async def test_what_a_recipe_states_stays_and_is_computed_once(tmp_path: Path) -> None:
    class Stated(Calc):
        name = "stated"
        environment = Environment(name="e", version="7", data_snapshot="d", root_sha256="r", tools={"python": "0"})

    environments = Environments(Settings())
    recipe = Stated()
    found = await environments.of(recipe.task(ROW))
    assert (found.data_snapshot, found.root_sha256, found.tools) == ("d", "r", {"python": "0"})
    assert await environments.of(recipe.task(ROW)) is found
    recipe.environment = dataclasses.replace(recipe.environment, version="8")
    assert (await environments.of(recipe.task(ROW))).version == "8"


async def test_sessions_of_a_recipe_with_files_start_from_them() -> None:
    class Seeded(Calc):
        name = "seeded"
        workspace = BlobRef("a" * 64, 7)

    assert (Seeded().task(ROW).workspace, RECIPE.task(ROW).workspace) == (Seeded.workspace, None)
    assert (await Environments(Settings()).of(Seeded().task(ROW))).data_snapshot == "a" * 64
    log, settings, after = MemoryLog(), Settings(), BlobRef("b" * 64, 8)
    await apply(log, settings)
    async with EventLog.open(log, MemoryRegistry(), writer="runner") as events:
        role = Role("runner", "runner-0", settings, log, events, MemoryBlobs(), Health("runner"))
        results = ToolResults()
        results.expect("o")
        calls = ToolCalls(events, results, REQUEST, "s", Seeded.sandbox, 60.0)
        calls.begin(await first_workspace(Seeded().task(ROW), role.blobs))
        for number in range(2):
            running = asyncio.create_task(calls.call(SandboxCall("python", {"code": "1"}), f"c{number}"))
            while len(await all_events(role, TOOL_CALLS)) <= number:
                await log.broker.changed(0.05)
            results.feed(dataclasses.replace(ANSWER, call_id=f"c{number}", call_seq=number, workspace=after))
            await running
        assert [event.workspace for event in await all_events(role, TOOL_CALLS)] == [Seeded.workspace, after]  # type: ignore[attr-defined]


async def test_sessions_on_rows_with_files_start_from_those_of_their_row() -> None:
    class Held(Calc):
        name = "held"

        def files(self, task: TaskRow) -> Any:
            return task["files"]

    blobs = MemoryBlobs()
    refs = [
        await first_workspace(Held().task({"prompt": "", "files": {"calc.py": text}}), blobs)
        for text in ("a", "b", "a")
    ]
    assert refs[0] == refs[2] != refs[1]
    assert refs[0] is not None
    assert await read(await fetch_manifest(refs[0], blobs), blobs) == {"calc.py": b"a"}
    assert await first_workspace(RECIPE.task(ROW), blobs) is None
    for files, said in (({"../x": ""}, r"'held': file '../x'"), (3, "int says")):
        with pytest.raises(BrokenRecipe, match=said):
            await first_workspace(Held().task({"prompt": "", "files": files}), blobs)


async def test_an_image_is_known_by_its_files_or_said_to_be_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("usr/bin", "etc"):
        (tmp_path / "debian" / folder).mkdir(parents=True)

    class Imaged(Calc):
        name = "imaged"
        sandbox = SandboxSpec(image="debian")

    class Gone(Calc):
        name = "gone"
        sandbox = SandboxSpec(image="gone")

    environments = Environments(Settings(sandbox=SandboxSettings(image_folder=str(tmp_path))))
    imaged, gone = await environments.of(Imaged().task(ROW)), await environments.of(Gone().task(ROW))
    assert (imaged.image, len(imaged.root_sha256 or "")) == ("debian", 64)
    assert (gone.image, gone.root_sha256) == ("gone", None)
    assert "sessions of recipe gone are recorded without root_sha256: image 'gone' is not in" in caplog.text


def test_a_policy_is_equal_where_what_is_allowed_is() -> None:
    spec = SandboxSpec(env={"A": "1"})
    base = policy_sha256(spec, EGRESS)
    assert policy_sha256(dataclasses.replace(spec, env={"A": "2"}), EgressSettings(mode="replay")) == base
    changed = [
        dataclasses.replace(spec, backend="subprocess"),
        dataclasses.replace(spec, limits=SandboxLimits(cpu_s=3)),
        dataclasses.replace(spec, env={"B": "1"}),
        dataclasses.replace(spec, allow=("GET https://a.test/*",)),
        (open_ := dataclasses.replace(spec, network="allowlist")),
    ]
    digests = {base, *(policy_sha256(other, EGRESS) for other in changed)}
    assert policy_sha256(open_, EgressSettings(signing_key="s3cret")) == policy_sha256(open_, EGRESS)
    digests.add(policy_sha256(open_, EgressSettings(allow=("GET https://a.test/*",))))
    assert len(digests) == 7


def test_equal_surroundings_have_equal_names() -> None:
    assert environment_digest({"a": 1, "b": ["x"]}) == environment_digest({"b": ["x"], "a": 1})
    assert len(environment_digest({})) == 64
    with pytest.raises(ValueError, match="JSON compliant"):
        environment_digest({"a": float("nan")})


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ({"action": [1, {"x": None}], "reset": False}, b'{"action": [1, {"x": null}], "reset": false}'),
        ({"code": "n\xe9"}, b'{"code": "n\xc3\xa9"}'),
        ({"code": "\ud800"}, rb'{"code": "\ud800"}'),
    ],
)
def test_arguments_of_any_shape_and_half_a_surrogate_reach_the_log(arguments: dict[str, Any], sent: bytes) -> None:
    assert json_of(SandboxCall("env_step", arguments)) == sent
