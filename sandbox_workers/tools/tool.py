"""Interface of a tool: arguments that a JSON schema allows, and a coroutine that acts in a sandbox.

A package offers its own as `name = "module:TOOL"` under the entry point group `turnlog.tools`.

ToolEnd               raised by a tool to end its call
├── ToolFailed        the tool refuses or fails: a tool_error whose text the model reads
├── InfraFailed       a server that the tool speaks to fails: an infra_error with a named reason
└── CallEnded         a command of the call met a limit or was cancelled: that is how the call ended
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from jsonschema import Draft202012Validator, SchemaError, ValidationError  # type: ignore[import-untyped]
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from turnlog.infra.environments.tools import Schema
from turnlog.sandbox_workers.connections import SessionConnections
from turnlog.sandbox_workers.protocol import Command, Execution, Kind, OnOutput, Sandbox
from turnlog.sandbox_workers.server_sandboxes import ServerSandboxes
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus
from turnlog.schemas.json_depth import deeper_than, more_than

if TYPE_CHECKING:
    from turnlog.sandbox_workers.egress.way_out import WayOut

Validator: TypeAlias = Draft202012Validator
LEVELS = 64
"""Maximum nesting depth of arrays and objects."""
VALUES = 50_000
"""Maximum number of values (numbers, strings, arrays and so on) in a call's arguments: each becomes an object of the
worker and is examined."""
ERRORS = 50
"""Maximum number of errors examined to find the most informative one."""
SHOWN, TEXT = 60, 600
"""Maximum characters of one value, and of a whole refusal."""
KINDS = {
    "string": "a string", "integer": "an integer", "number": "a number", "boolean": "true or false",
    "object": "an object", "array": "an array", "null": "null",
}  # fmt: skip
BOUNDS = {
    "minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above", "exclusiveMaximum": "below",
    "minLength": "at least this many characters long:", "maxLength": "at most this many characters long:",
    "minItems": "of at least this many items:", "maxItems": "of at most this many items:",
    "pattern": "matched by", "const": "", "multipleOf": "a multiple of",
}  # fmt: skip


class ToolEnd(Exception):
    """Base class of the errors listed in the module docstring."""


class ToolFailed(ToolEnd):
    """The tool refuses or fails; the message goes to the model."""


class InfraFailed(ToolEnd):
    """A server outside of the call failed; the session is retried."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class CallEnded(ToolEnd):
    """A command met a limit or was cancelled; `execution` is how the call ended."""

    def __init__(self, execution: Execution) -> None:
        super().__init__(f"{execution.status}: {execution.reason}")
        self.execution = execution


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """Context of a call: its place in its session, and its ways to servers outside."""

    call_id: str = ""
    """Idempotency key of the call."""
    call_seq: int = 0
    """Number of the call in its session."""
    connections: SessionConnections = field(default_factory=SessionConnections)
    """The session's connections at this worker; without those that were lost."""
    way_out: Callable[[], WayOut] | None = None
    """Creates a way to servers outside, which its user closes; None if the worker's [egress] allow names nothing."""
    shared: SessionConnections | None = None
    """Connections and servers that the worker keeps for all of its sessions; None where there is no worker."""
    server_sandboxes: ServerSandboxes | None = None
    """Starts sandboxes for servers that are kept in `shared`; None where there is no worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call, as a tool receives it."""

    arguments: Mapping[str, Any]
    """Arguments, validated against the tool's schema."""
    sandbox: Sandbox
    limits: SandboxLimits
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the request's SandboxSpec and of the egress proxy, added to every command's environment."""
    on_output: OnOutput | None = None
    context: CallContext = field(default_factory=CallContext)
    began: float = field(default_factory=time.perf_counter)

    async def exec(
        self, command: Command, *, limits: SandboxLimits | None = None, on_output: OnOutput | None = None
    ) -> Execution:
        """Run a command within the call's limits, or stricter ones. Return its execution if it ended by itself (ok or
        tool_error). Raises CallEnded for any other end, FileRefused, SandboxDied."""
        command = dataclasses.replace(command, env={**self.env, **command.env})
        execution = await self.sandbox.exec(command, limits or self.limits, on_output=on_output or self.on_output)
        if execution.status not in (ToolStatus.ok, ToolStatus.tool_error):
            raise CallEnded(execution)
        return execution

    def answer(self, output: str | bytes, *, status: ToolStatus = ToolStatus.ok, reason: str = "") -> Execution:
        """Build the execution of a call that ran no program, or whose program's output is not the answer."""
        content = output.encode(errors="replace") if isinstance(output, str) else output
        code = {ToolStatus.ok: 0, ToolStatus.tool_error: 1}.get(status)
        return Execution(status, reason, code, content, time.perf_counter() - self.began, 0.0)


def in_a_sandbox(arguments: Mapping[str, Any]) -> bool:
    """Return True: the call takes a sandbox."""
    return True


def always(arguments: Mapping[str, Any], spec: SandboxSpec, limits: SandboxLimits) -> str:
    """Accept every call that the schema allows."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool. `run` may use `call.sandbox` as it likes. An exception other than ToolEnd or SandboxError ends the call
    as infra_error `tool_broken`."""

    name: str
    version: str
    """Version recorded on SessionStarted; changes when the same call may answer otherwise."""
    about: str
    schema: Schema
    """JSON Schema of the arguments: draft 2020-12, type object, no references to elsewhere."""
    run: Callable[[Call], Awaitable[Execution]]
    kinds: frozenset[Kind] = frozenset()
    """Kinds of command that the tool runs; a backend that does not serve one of them does not serve the tool."""
    once: bool | Callable[[Mapping[str, Any]], bool] = False
    """True if effects outside the sandbox cannot be undone; then a run that ended without an answer is not repeated. A
    function decides by the arguments."""
    sandboxed: Callable[[Mapping[str, Any]], bool] = in_a_sandbox
    """Whether the call takes a sandbox. Without one, `call.sandbox` serves nothing."""
    leaves_state: bool | Callable[[Mapping[str, Any]], bool] = True
    """True if a call of kind `session` leaves state in the interpreter that a new one would lack."""
    output_bytes: int = 0
    """Bytes that an answer may have in any case; 0 if output_bytes of the call is the limit."""
    legal: Callable[[Mapping[str, Any], SandboxSpec, SandboxLimits], str] = always
    """Check for what the schema cannot express, called before anything runs. Returns the text of a refusal, or an empty
    string."""
    validator: Validator = field(init=False, repr=False, compare=False)
    """Validator of `schema`, created once."""

    def __post_init__(self) -> None:
        """Build the validator. Raises ValueError if `schema` is not a valid schema."""
        object.__setattr__(self, "validator", checked_schema(self.schema))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal to run a call: reason for machines, text for the model."""

    reason: str
    """tool | arguments | argument_bytes | backend | network | image | sandbox"""
    text: str


class ArgumentsRefused(Exception):
    """The arguments are not legal. The message states the error and what is legal, for the model."""


def checked_schema(schema: Schema) -> Validator:
    """Return the validator of a schema. Raises ValueError if it is no schema of an object, or refers to something
    outside itself."""
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"no JSON schema: {_path(error)}: {error.message[:200]}") from None
    if schema.get("type") != "object":
        raise ValueError('a schema of arguments has "type": "object"')
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(dict(schema)))
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise ValueError(f"its reference {reference!r} leads nowhere: schemas refer to themselves alone") from None
    return Draft202012Validator(schema, registry=Registry())  # an empty registry fetches nothing


def parse_arguments(raw: bytes, validator: Validator, tool: str) -> dict[str, Any]:
    """Parse and validate the arguments. Raises ArgumentsRefused."""
    try:
        values = _parse_json(raw)
        if fits(validator.schema, values):
            return values  # type: ignore[no-any-return]  # the schema is one of an object
    except RecursionError:
        raise ArgumentsRefused(f"the arguments are nested too deeply; {tool} takes {usage(validator.schema)}") from None
    except ValueError as error:
        raise ArgumentsRefused(f"the arguments are not JSON: {error}"[:TEXT]) from None
    takes = f"{tool} takes {usage(validator.schema)}"
    try:
        if not isinstance(values, dict):
            raise ArgumentsRefused(f"the arguments must be an object, got {describe_value(values)}; {takes}")
        errors = list(itertools.islice(validator.iter_errors(values), ERRORS))
    except RecursionError:
        raise ArgumentsRefused(f"the arguments are nested too deeply; {takes}") from None
    if errors:
        raise ArgumentsRefused(f"{_most_telling(errors)[:TEXT]}; {takes}")
    return values


TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,),
    "array": (list,),
}  # fmt: skip
SIMPLE = frozenset({"type", "properties", "required", "additionalProperties", "description", "title", "default"})


def fits(schema: Schema, value: object) -> bool:
    """Return True only if the value is surely valid, by the simple keywords alone; most calls are, and a JSON schema's
    validator takes a tenth of the time of a small call. False says nothing: ask the validator."""
    kind = schema.get("type")
    if not SIMPLE.issuperset(schema) or (kind is not None and type(value) not in TYPES.get(str(kind), ())):
        return False
    if not isinstance(value, dict):
        return True
    properties = schema.get("properties", {})
    if schema.get("additionalProperties", True) is not True and not properties.keys() >= value.keys():
        return False
    return all(name in value for name in schema.get("required", ())) and all(
        fits(properties[name], part) for name, part in value.items() if name in properties
    )


def usage(schema: Schema) -> str:
    """Describe a call's form in one line: {"path": "...", "lines": 1}, followed by the names of optional arguments."""
    properties: Mapping[str, Schema] = schema.get("properties", {})
    needed = [name for name in properties if name in schema.get("required", ())]
    spare = [name for name in properties if name not in needed]
    form = "{" + ", ".join(f'"{name}": {_placeholder(properties[name])}' for name in needed) + "}"
    return form + (f"; it may have {', '.join(spare)}" if spare else "")


def describe_value(value: object) -> str:
    """Describe a value in few words."""
    if isinstance(value, str):
        return json.dumps(value) if len(value) <= SHOWN else f"{json.dumps(value[:SHOWN])}... ({len(value)} characters)"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        names = ", ".join(name[:20] for name in itertools.islice(value, 5))
        return f"an object of {len(value)} ({names})" if names else "an empty object"
    return json.dumps(value)[:SHOWN]


def _parse_json(raw: bytes) -> Any:
    """Parse JSON. Raises ValueError, RecursionError, ArgumentsRefused."""
    if deeper_than(raw, LEVELS):
        raise RecursionError
    if more_than(raw, VALUES):
        raise ArgumentsRefused(f"the arguments hold more than {VALUES} values; put them into a file or a string")
    text = raw.decode()
    values = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_number)
    if "\\u" in text:
        _encodable(values)
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{describe_value(twice)} stands there twice")
    return values


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


def _encodable(values: object) -> None:
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a string holds half of a surrogate pair, which is no character") from None


def _references(schema: object) -> set[str]:
    if isinstance(schema, Mapping):
        own = {schema["$ref"]} if isinstance(schema.get("$ref"), str) else set()
        return own.union(*(_references(part) for part in schema.values()))
    return set().union(*(_references(part) for part in schema)) if isinstance(schema, list | tuple) else set()


def _most_telling(errors: list[ValidationError]) -> str:
    """Describe the error at the shallowest place, preferring a missing argument to a wrong one."""
    return _describe_violation(min(errors, key=lambda error: (len(error.absolute_path), error.validator != "required")))


def _describe_violation(error: ValidationError) -> str:
    where, rule, legal, found = _path(error), str(error.validator), error.validator_value, error.instance
    match rule:
        case "required":
            missing = ", ".join(describe_value(name) for name in legal if name not in found)
            return f"missing: {missing}" + (f" in {where}" if error.path else "")
        case "additionalProperties" if legal is False:
            more = [describe_value(name) for name in found if name not in error.schema.get("properties", {})]
            return f"unknown: {', '.join(more[:5])}" + (f" in {where}" if error.path else "")
        case "type":
            kinds = [legal] if isinstance(legal, str) else legal
            return f"{where} must be {' or '.join(KINDS[kind] for kind in kinds)}, got {describe_value(found)}"
        case "enum":
            choices = ", ".join(describe_value(value) for value in legal)[:300]
            return f"{where} must be one of {choices}, got {describe_value(found)}"
        case _ if rule in BOUNDS:
            return f"{where} must be {BOUNDS[rule]} {describe_value(legal)}, got {describe_value(found)}"
        case _:
            return f"{where}: not as {rule} of the schema says: {json.dumps(legal)[:200]}; got {describe_value(found)}"


def _path(error: ValidationError | SchemaError) -> str:
    """Return the path of the argument as one writes it: "points"[2].x"""
    parts = list(error.absolute_path)
    if not parts:
        return "the arguments"
    deeper = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts[1:])
    return f'"{parts[0]}"{deeper}'[:200]


def _placeholder(schema: Schema) -> str:
    kind = schema.get("type")
    blank = {"string": '"..."', "integer": "1", "number": "1.0", "boolean": "true", "array": "[...]", "object": "{...}"}
    return blank.get(kind, "...") if isinstance(kind, str) else "..."
