"""What a model sends as arguments: refused before anything runs, in words that it can read."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from tests.each import each
from turnlog.infra.environments.tools import BUILT_IN, UnknownTool, tool_declarations
from turnlog.sandbox_workers.protocol import Kind
from turnlog.sandbox_workers.tools import Prepared, Refusal, Tool, prepared, tools
from turnlog.sandbox_workers.tools.tool import LEVELS, checked_schema, fits
from turnlog.schemas.events import SandboxLimits, SandboxSpec

SPEC = SandboxSpec(durable_workspace=True)
LIMITS = SandboxLimits(wall_s=30.0)
NESTED = b'{"path": "a", "content": ' + b"[" * LEVELS + b"]" * LEVELS + b"}"


def refusal(tool: str, arguments: bytes | dict[str, object], spec: SandboxSpec = SPEC) -> Refusal:
    """Why the call is not run."""
    raw = arguments if isinstance(arguments, bytes) else json.dumps(arguments).encode()
    refused = prepared(tool, raw, spec, LIMITS)
    assert isinstance(refused, Refusal), refused
    return refused


@each(
    ("tool", "arguments"),
    [
        ("python", {"code": "print(1)"}),
        ("python", {"code": "print(1)", "language": "python"}),
        ("shell", {"command": "ls"}),
        ("shell", {"command": "cat", "stdin": "x", "cwd": "a/b", "timeout_s": 2.5}),
        ("python_session", {"code": "x = 1"}),
        ("read_file", {"path": "a", "offset": 3, "lines": 2}),
        ("write_file", {"path": "a/b", "content": ""}),
        ("edit_file", {"path": "a", "old": "x", "new": "", "all": True}),
        ("env_step", {"action": None}),
        ("env_step", {"reset": True, "seed": 3, "options": {"level": 2}, "environment": "games.grid:Grid.easy"}),
    ],
)
def test_what_a_tool_takes_is_prepared(tool: str, arguments: dict[str, object]) -> None:
    found = prepared(tool, json.dumps(arguments).encode(), SPEC, LIMITS)
    assert isinstance(found, Prepared)
    assert (found.tool.name, found.arguments) == (tool, arguments)


@each(
    ("tool", "arguments", "said"),
    [
        ("python", b"{", "not JSON: Expecting property name"),
        ("python", b"\xff{}", "not JSON: 'utf-8' codec"),
        ("python", b"[]", 'must be an object, got an array of 0; python takes {"code": "..."}'),
        ("python", b'{"code": 3}', '"code" must be a string, got 3; python takes {"code": "..."}'),
        ("python", b'{"command": "ls"}', 'missing: "code"; python takes {"code": "..."}'),
        ("python", b'{"code": "1", "code": "2"}', '"code" stands there twice'),
        ("python", b'{"code": NaN}', "NaN is no JSON"),
        ("python", b'{"code": 1e999}', "the number 1e999 is too large"),
        ("python", b'{"code": 1' + b"0" * 5000 + b"}", "not JSON: Exceeds the limit"),
        ("python", rb'{"code": "\ud800"}', "half of a surrogate pair"),
        ("python_session", rb'{"code": "\ud800"}', "half of a surrogate pair"),
        ("shell", rb'{"command": "rm \ud800"}', "half of a surrogate pair"),
        ("shell", rb'{"command": "cat", "stdin": "\ud800"}', "half of a surrogate pair"),
        ("python", b'{"a": ' + b"[" * 90_000, "nested too deeply"),
        ("write_file", NESTED, "nested too deeply"),
        ("write_file", {"path": "a", "content": "b", "mode": 7}, 'unknown: "mode"; write_file takes {"path": "...",'),
        ("read_file", {"path": ""}, '"path" must be at least this many characters long: 1, got ""'),
        ("read_file", {"path": "a", "lines": 0}, '"lines" must be at least 1, got 0'),
        ("read_file", {"path": "a", "offset": 1.5}, '"offset" must be an integer, got 1.5'),
        ("edit_file", {"path": "a", "old": "", "new": "b"}, '"old" must be at least'),
        ("edit_file", {"path": "a"}, 'missing: "old", "new"; edit_file'),
        ("shell", {"command": "ls", "timeout_s": 0}, '"timeout_s" must be above 0, got 0'),
        ("shell", {"command": "ls", "timeout_s": True}, '"timeout_s" must be a number, got true'),
        ("shell", {"command": "ls", "timeout_s": 31}, 'shell: "timeout_s" must be at most 30, got 31'),
        ("env_step", {}, 'env_step: missing: "action", or "reset": true'),
        ("env_step", {"reset": True, "action": 1}, 'takes no "action"'),
        ("env_step", {"action": 1, "seed": 1}, '"seed" goes with "reset": true alone'),
        ("env_step", {"reset": True, "environment": "os; x"}, '"environment" must be matched by'),
    ],
)
def test_what_it_does_not_take_is_refused_with_what_is_wrong_and_what_is_legal(
    tool: str, arguments: bytes | dict[str, object], said: str
) -> None:
    refused = refusal(tool, arguments)
    assert refused.reason == "arguments"
    assert said in refused.text


def test_deep_nesting_within_strings_is_no_nesting() -> None:
    text = "[" * 10_000 + '"{' * 100
    found = prepared("write_file", json.dumps({"path": "a", "content": text}).encode(), SPEC, LIMITS)
    assert isinstance(found, Prepared)
    assert found.arguments["content"] == text


def test_an_unknown_tool_is_answered_with_those_there_are() -> None:
    refused = refusal("browser" * 1000, {})
    assert refused.reason == "tool"
    assert "tools are python, shell, python_session, read_file, write_file, edit_file, env_step" in refused.text
    assert len(refused.text) < 400


def test_arguments_beyond_the_limit_are_refused_before_they_are_parsed() -> None:
    refused = prepared("python", b"{" * 5_000_000, SPEC, LIMITS)
    assert refused == Refusal(
        "argument_bytes", "the arguments are 5000000 bytes; they may be 4194304 ([sandbox] argument_bytes)"
    )


@pytest.mark.parametrize("value", ["x" * 4_000_000, ["x" * 4_000_000], {"x" * 4_000_000: 1}, [[]] * 1000])
def test_a_refusal_never_echoes_what_was_sent_at_length(value: object) -> None:
    for tool, name in (("write_file", "path"), ("read_file", "more"), ("env_step", "environment")):
        assert len(refusal(tool, {name: value}).text) < 1200


@pytest.mark.parametrize("tool", ["python_session", "env_step"])
def test_what_lives_in_an_interpreter_needs_a_sandbox_that_stays(tool: str) -> None:
    arguments: dict[str, object] = {"code": "1"} if tool == "python_session" else {"action": 1}
    refused = refusal(tool, arguments, dataclasses.replace(SPEC, durable_workspace=False))
    assert (refused.reason, "durable_workspace" in refused.text) == ("arguments", True)


def test_tools_say_which_commands_they_run() -> None:
    kinds = {name: tool.kinds for name, tool in tools().items()}
    assert kinds["env_step"] == kinds["python_session"] == {Kind.session}
    assert (kinds["python"], kinds["shell"], kinds["read_file"]) == ({Kind.python}, {Kind.shell}, frozenset())


def test_declarations_for_a_model_come_from_the_schemas_that_validate() -> None:
    shell, step = tool_declarations(["shell", "env_step"])
    assert shell["function"]["name"] == "shell"
    assert shell["function"]["parameters"] == BUILT_IN["shell"].arguments
    assert set(step["function"]["parameters"]["properties"]) == {"action", "reset", "seed", "options", "environment"}
    with pytest.raises(UnknownTool, match=r"browser.*python, shell"):
        tool_declarations(["browser"])


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "object", "required": "code"}, "no JSON schema"),
        ({"type": "array"}, '"type": "object"'),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.test/schema"}}}, "leads nowhere"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "leads nowhere"),
    ],
)
def test_a_schema_that_cannot_validate_makes_no_tool(schema: dict[str, object], said: str) -> None:
    async def run(call: object) -> None: ...

    with pytest.raises(ValueError, match=said.replace("$", r"\$")):
        Tool(name="own", version="1", about="", schema=schema, run=run)  # type: ignore[arg-type]


def test_a_schema_may_refer_to_itself_and_say_more_than_types() -> None:
    async def run(call: object) -> None: ...

    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.test/own",
        "type": "object",
        "properties": {"unit": {"enum": ["m", "ft"]}, "points": {"type": "array", "items": {"$ref": "#/$defs/point"}}},
        "$defs": {"point": {"type": "object", "required": ["x"], "properties": {"x": {"multipleOf": 5}}}},
        "oneOf": [{"required": ["unit"]}, {"required": ["points"]}],
    }
    own = {"own": Tool(name="own", version="1", about="", schema=schema, run=run)}  # type: ignore[arg-type]
    texts = [
        prepared("own", json.dumps(arguments).encode(), SPEC, LIMITS, among=own)
        for arguments in ({"unit": "km"}, {"points": [{"x": 5}, {"y": 1}]}, {"points": [{"x": 7}]}, {})
    ]
    said = [text.text if isinstance(text, Refusal) else "" for text in texts]
    assert '"unit" must be one of "m", "ft", got "km"' in said[0]
    assert 'missing: "x" in "points"[1]' in said[1]
    assert '"points"[0].x must be a multiple of 5, got 7' in said[2]
    assert "the arguments: not as oneOf of the schema says" in said[3]


VALUES = [None, True, 0, 1.5, "", "a", [], [1], {}, {"a": 1}, {"a": "x", "b": {}}, {"b": {"c": 1}}, {"b": 1}, {"d": 0}]
PARTS = [
    {}, {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "object"},
    {"type": "string", "minLength": 9}, {"enum": [1]}, {"type": ["string", "null"]},
    {"type": "object", "properties": {"c": {"type": "string"}}, "required": ["c"], "additionalProperties": False},
]  # fmt: skip


def test_what_is_found_valid_without_the_validator_is_valid() -> None:
    found = 0
    for a, b, closed, required in itertools.product(PARTS, PARTS, (True, False), ([], ["a"])):
        schema = {"type": "object", "properties": {"a": a, "b": b}, "required": required}
        schema |= {"additionalProperties": False} if closed else {}
        validator = checked_schema(schema)
        for value in VALUES:
            if fits(schema, value):
                found += 1
                assert validator.is_valid(value), (schema, value)
    assert found > 300
