"""The source openenv: its options, its tasks, and what a model reads and may do."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from turnlog.infra.environments.episodes import SandboxAnswer, SandboxCall
from turnlog.infra.environments.sources import BadSource, task_source
from turnlog.infra.environments.tasks import Task

URL = "http://envs.example:8000"
SCHEMA = {
    "type": "object", "title": "Move", "description": "A move.", "required": ["to"], "additionalProperties": False,
    "properties": {
        "to": {"type": "integer", "title": "To", "maximum": 9},
        "title": {"type": "string", "title": "Title"},
        "metadata": {"type": "object"},
    },
}  # fmt: skip


def task(text: str, **row: Any) -> Task:
    """A task of a source."""
    return task_source(text).task({"prompt": "Play.", **row})


def answer(observation: Any, *, done: bool = False, **more: Any) -> SandboxAnswer:
    """What the tool answers."""
    said = {"observation": observation, "reward": 0.5, "terminated": done, "truncated": False, "info": {}, **more}
    return SandboxAnswer(True, json.dumps(said))


@each(
    ("options", "says"),
    [
        ("", "url=http://HOST:PORT"),
        (f"url={URL} command=x", "not both"),
        ("url=example:8000", "is no server's URL"),
        ("url=http://user@example:8000", "without user"),
        (f"url={URL} action=voice", "must be one of json, text, tools"),
        (f"url={URL} tasks=0", "tasks=0: must be a whole number from 1 on"),
        (f"url={URL} seed=-1", "seed=-1"),
        (f"url={URL} wall_s=soon", "wall_s=soon: must be a number above 0"),
        (f"url={URL} options=[1]", "must be a JSON object"),
        (f"url={URL} options={{", "must be a JSON object"),
        (f"url={URL} image=debian", "not both"),
        (f"url={URL} backend=docker", "backend goes with image or command"),
        (f"url={URL} speed=3", "the options of openenv are url, command"),
    ],
)
def test_an_option_that_cannot_be_is_named_with_what_is_legal(options: str, says: str) -> None:
    with pytest.raises(BadSource, match=f"openenv {options}".rstrip()[:12]) as raised:
        task_source(f"openenv {options}".rstrip())
    assert says in str(raised.value)


def test_tasks_are_seeds_and_repeat_themselves(tmp_path: Path) -> None:
    few = task_source(f"openenv url={URL} tasks=3 seed=5 name=maze")
    assert [row["id"] for row in few.tasks(0)] == [row["id"] for row in few.tasks(1)] == ["maze-5", "maze-6", "maze-7"]
    endless = task_source(f"openenv url={URL}")
    first, other = ([row["seed"] for row in itertools.islice(endless.tasks(seed), 50)] for seed in (0, 1))
    assert first == list(range(50))
    assert not set(first) & set(other)
    few.write_dataset(tmp_path / "a", 3, 0)
    few.write_dataset(tmp_path / "b", 3, 0)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_opening_is_a_reset_with_seed_and_options() -> None:
    made = task(f"openenv url={URL}/ options='{{\"level\": 2}}' max_turns=7 wall_s=5", seed=3, options={"size": 4})
    assert made.opening == SandboxCall(
        "openenv",
        {"reset": True, "server": URL, "describe": True, "options": {"level": 2, "size": 4}, "seed": 3},
    )
    assert (made.max_turns, made.sandbox.limits.wall_s, made.sandbox_tools) == (7, 5.0, ("openenv",))


@each(
    ("options", "server", "label"),
    [
        ("image=reg.example:5000/a/game:2", {"image": "reg.example:5000/a/game:2", "backend": "docker"}, "game"),
        ("image=game@sha256:00 backend=mine", {"image": "game@sha256:00", "backend": "mine"}, "game"),
        ("image=game command='/bin/serve {port}'", {"image": "game", "command": ["/bin/serve", "{port}"]}, "serve"),
    ],
)
def test_an_image_alone_is_a_container_and_with_a_command_what_the_backend_makes_of_it(
    options: str, server: dict[str, Any], label: str
) -> None:
    made = task(f"openenv {options}")
    assert made.opening is not None
    assert made.opening.arguments["server"] == server
    assert made.environment.name == label


def test_a_model_gets_a_tool_of_the_servers_schema_and_acts_by_it() -> None:
    made = task(f"openenv url={URL}")
    assert made.opened is not None
    opening = made.opened(answer({"board": "..x", "metadata": {}}, action_schema=SCHEMA))
    assert opening.messages == ({"role": "user", "content": '{"board": "..x"}'},)
    [tool] = opening.tools
    assert tool["function"]["name"] == "act"
    assert tool["function"]["parameters"] == {
        "type": "object", "description": "A move.", "required": ["to"], "additionalProperties": False,
        "properties": {"to": {"type": "integer", "maximum": 9}, "title": {"type": "string"}},
    }  # fmt: skip
    assert made.tool_call("act", '{"to": 3}') == SandboxCall("openenv", {"action": {"to": 3}})
    assert made.tool_call("act", "{") == (
        "the arguments are not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    )
    assert made.tool_call("act", "[]") == "the arguments must be an object"
    assert made.tool_call("jump", "{}") == "there is no tool 'jump'; act by 'act'"


def test_a_message_is_an_action_where_actions_are_text() -> None:
    made = task(f"openenv url={URL} action=text field=line")
    assert made.opened is not None
    assert made.text_action is not None
    opening = made.opened(answer({"line": "You are in a maze.", "metadata": {}}))
    assert (opening.messages[0]["content"], opening.tools) == ("You are in a maze.", ())
    assert made.text_action("go north") == SandboxCall("openenv", {"action": {"line": "go north"}})
    assert isinstance(made.tool_call("act", "{}"), str)


def test_the_environments_own_tools_are_called_by_their_names() -> None:
    made = task(f"openenv url={URL} action=tools")
    assert made.opened is not None
    listed = [{"name": "look", "description": "Look.", "inputSchema": {"type": "object", "properties": {}}}]
    opening = made.opened(answer({"text": "dark"}, tools=listed, action_schema={}))
    assert [tool["function"]["name"] for tool in opening.tools] == ["look"]
    assert made.tool_call("look", '{"at": "wall"}') == SandboxCall(
        "openenv", {"action": {"type": "call_tool", "tool_name": "look", "arguments": {"at": "wall"}}}
    )


def test_an_answer_ends_the_episode_when_the_environment_says_so_and_an_error_does_not() -> None:
    made = task(f"openenv url={URL}")
    call = SandboxCall("openenv", {"action": {}})
    last = made.observe(call, answer("won", done=True))
    cut = made.observe(call, SandboxAnswer(False, answer("late", truncated=True).output))
    error = made.observe(call, SandboxAnswer(False, "Invalid message\nto: too large\n"))
    assert (last.content, last.done, cut.done) == ("won", True, True)
    assert (error.content, error.done) == ("Invalid message\nto: too large\n", False)


def test_a_server_that_workers_start_is_part_of_the_opening() -> None:
    made = task('openenv command="python -m maze --port {port}" image=maze port=9000 env=\'{"SIZE": "3"}\' ready_s=90')
    assert made.opening is not None
    assert made.opening.arguments["server"] == {
        "command": ["python", "-m", "maze", "--port", "{port}"], "image": "maze", "port": 9000,
        "env": {"SIZE": "3"}, "ready_s": 90.0,
    }  # fmt: skip
