"""Request bodies, parsed by hand with typed errors: no model classes on the hot path."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from turnlog.producers.gateway.errors import BadRequest
from turnlog.producers.gateway.images import Admitted, Picture
from turnlog.producers.gateway.messages import Message, normalised
from turnlog.producers.gateway.metrics import IGNORED
from turnlog.schemas import ids
from turnlog.schemas.events.sessions import Agent, Environment, Expects, Outcome
from turnlog.schemas.events.tasks import Purpose, Sampling
from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than
from turnlog.schemas.types import TurnId

HONOURED = frozenset(
    {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options"}
)  # fmt: skip
COUNTED = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "logprobs", "top_logprobs", "logit_bias",
        "frequency_penalty", "presence_penalty", "response_format", "tool_choice", "parallel_tool_calls", "user",
        "store", "metadata", "reasoning_effort", "service_tier", "chat_template_kwargs",
    }
)  # fmt: skip
"""Ignored fields that have a label of their own; the rest count as "other", since a label must not be a client's."""

LEAST = {"group_size": 1, "min_weight_version": -1, "max_tokens": 1, "max_completion_tokens": 1, "max_new_tokens": 1,
         "seed": -(2**63)}  # fmt: skip
"""Of integers that do not begin at 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """POST /v1/chat/completions."""

    raw: list[Any]
    """messages as they came"""
    messages: tuple[Message, ...]
    tools: list[Any] | None
    max_new_tokens: int | None
    stream: bool
    include_usage: bool
    sha256: str
    """Of the body's bytes."""
    images: Mapping[str, Admitted] = field(default_factory=dict)
    """By sha256, once they are in the store."""

    @property
    def pictures(self) -> list[Picture]:
        """Every image of the messages, in order."""
        return [picture for one in self.messages for picture in one.pictures]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """POST /sessions."""

    run_id: str
    group_id: str
    session_id: str
    task_id: str
    group_size: int
    rollout_id: str
    rollout_index: int
    attempt: int
    purpose: Purpose
    recipe: str
    floor: int | None
    """None: read by the gateway."""
    agent: Agent
    environment: Environment
    sampling: Sampling
    max_context_tokens: int
    min_weight_version: int
    pin_weight_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequest:
    """POST /sessions/{id}/finish."""

    outcome: Outcome
    reason: str
    final: bool
    expects: Expects
    judged: TurnId | None
    """The last turn of what got the verdict, or will."""


def chat_request(body: bytes, read: Callable[[Any], tuple[Message, ...]] = normalised) -> ChatRequest:
    """`read` makes messages of what came. Raises BadRequest naming the field."""
    values = _object(body)
    for name in values.keys() - HONOURED:
        IGNORED.labels(name if name in COUNTED else "other").inc()
    tools = values.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRequest("tools must be a list of objects", param="tools")
    limits = [_typed(values, name, int, None) for name in ("max_completion_tokens", "max_tokens")]
    options = values.get("stream_options")
    return ChatRequest(
        raw=values.get("messages") or [],
        messages=read(values.get("messages")),
        tools=tools,
        max_new_tokens=min((limit for limit in limits if limit is not None), default=None),
        stream=values.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        sha256=hashlib.sha256(body).hexdigest(),
    )


def open_request(body: bytes, *, run_id: str, fallback: Sampling, fresh: str) -> OpenRequest:
    """A session of a rollout; without rollout_id one of someone who tries the gateway: its group is itself, named by
    `fresh`. Raises BadRequest."""
    values = _object(body)
    rollout = _typed(values, "rollout_id", str, fresh)
    attempt = _typed(values, "attempt", int, 0)
    session = ids.session_id(rollout, attempt)
    if "rollout_id" in values and "group_id" not in values:
        raise BadRequest("a rollout's session needs group_id", param="group_id")
    try:
        purpose = Purpose(values.get("purpose", "other"))
    except ValueError:
        raise BadRequest(f"purpose must be one of {', '.join(Purpose)}", param="purpose") from None
    limits = _typed(values, "limits", dict, {})
    return OpenRequest(
        run_id=_typed(values, "run_id", str, run_id),
        group_id=_typed(values, "group_id", str, session),
        session_id=session,
        task_id=_typed(values, "task_id", str, ""),
        group_size=_typed(values, "group_size", int, 1),
        rollout_id=rollout,
        rollout_index=_typed(values, "rollout_index", int, 0),
        attempt=attempt,
        purpose=purpose,
        recipe=_typed(values, "recipe", str, ""),
        floor=_typed(values, "floor", int, None),
        agent=_agent(_typed(values, "agent", dict, {})),
        environment=_environment(_typed(values, "environment", dict, {})),
        sampling=_sampling(_typed(values, "sampling", dict, {}), fallback),
        max_context_tokens=_typed(limits, "max_context_tokens", int, 0),
        min_weight_version=_typed(values, "min_weight_version", int, -1),
        pin_weight_version=_typed(values, "pin_weight_version", int, None),
    )


def finish_request(body: bytes) -> FinishRequest:
    """Raises BadRequest."""
    values = _object(body)
    legal = [outcome.value for outcome in Outcome if outcome is not Outcome.unknown]
    if values.get("outcome") not in legal:
        raise BadRequest(f"outcome must be one of {', '.join(legal)}", param="outcome")
    expects = _typed(values, "expects", dict, {})
    return FinishRequest(
        outcome=Outcome(values["outcome"]),
        reason=_typed(values, "reason", str, ""),
        final=_typed(values, "final", bool, True),
        expects=Expects(
            reward=_typed(expects, "reward", bool, False), step_rewards=_typed(expects, "step_rewards", int, 0)
        ),
        judged=_turn(_typed(values, "judged", dict, None)),
    )


def _turn(values: dict[str, Any] | None) -> TurnId | None:
    if values is None:
        return None
    epoch, index = _typed(values, "epoch", str, None), _typed(values, "index", int, None)
    if epoch is None or index is None:
        raise BadRequest("judged must name a turn by epoch and index", param="judged")
    return TurnId(epoch, index)


def _agent(values: dict[str, Any]) -> Agent:
    return Agent(_typed(values, "name", str, "unknown"), _typed(values, "version", str, ""))


def _environment(values: dict[str, Any]) -> Environment:
    return Environment(
        name=_typed(values, "name", str, "none"),
        version=_typed(values, "version", str, ""),
        image=_typed(values, "image", str, None),
        data_snapshot=_typed(values, "data_snapshot", str, None),
        root_sha256=_typed(values, "root_sha256", str, None),
        policy_sha256=_typed(values, "policy_sha256", str, None),
        tools=_versions(_typed(values, "tools", dict, {})),
    )


def _versions(values: dict[str, Any]) -> dict[str, str]:
    if not all(isinstance(version, str) for version in values.values()):
        raise BadRequest("environment.tools must map names to versions", param="environment")
    return dict(values)


def _sampling(values: dict[str, Any], fallback: Sampling) -> Sampling:
    stops = _typed(values, "stop_token_ids", list, list(fallback.stop_token_ids))
    if not all(type(stop) is int and 0 <= stop < 2**31 for stop in stops):
        raise BadRequest("sampling.stop_token_ids must be token ids: integers from 0 on", param="sampling")
    temperature = values.get("temperature", fallback.temperature)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < 100:
        raise BadRequest("sampling.temperature must be a number from 0 on", param="sampling")
    new_tokens = _typed(values, "max_new_tokens", int, fallback.max_new_tokens)
    seed = _typed(values, "seed", int, None)
    return Sampling(
        temperature=float(temperature), max_new_tokens=new_tokens, stop_token_ids=tuple(stops), seed=seed
    )  # fmt: skip


def _object(body: bytes) -> dict[str, Any]:
    if deeper_than(body):
        raise BadRequest(f"the body is nested deeper than {MAX_DEPTH} levels: send what is deeper as text")
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body must be a JSON object: {error}") from None
    if not isinstance(values, dict):
        raise BadRequest("the body must be a JSON object")
    return values


def _typed(values: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = values.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise BadRequest(f"{name} must be {kind.__name__}, got {type(value).__name__}", param=name)
    if isinstance(value, int) and not LEAST.get(name, 0) <= value < 2**63:
        raise BadRequest(f"{name} must be from {LEAST.get(name, 0)} to 2^63 - 1, got {value}", param=name)
    return value
