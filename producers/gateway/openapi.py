"""OpenAPI description of /sessions, for services that open sessions from outside, and of /engines. Source: OpenAPI
3.1.0.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, get_args

from turnlog.schemas.events.sessions import Outcome
from turnlog.schemas.events.tasks import Purpose
from turnlog.settings import EngineKind

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer", "minimum": 0}


def _object(properties: dict[str, Schema], *required: str, about: str = "") -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "description": about}


def _field(schema: Schema, about: str) -> Schema:
    return {**schema, "description": about}


TURN = _object({"epoch": TEXT, "index": WHOLE}, "epoch", "index", about="`turnlog.epoch` and `.index` of an answer.")
VERIFIER = _object({"name": TEXT, "version": TEXT}, about="Two rewards by one verifier are one.")
REWARD = _object(
    {
        "value": _field({"type": "number"}, "Finite."),
        "components": _field({"type": "object", "additionalProperties": {"type": "number"}}, "Its parts, for display."),
        "evidence": _field({}, "What the verifier saw, as any JSON."),
        "verifier": VERIFIER,
        "player": _field(TEXT, "Player whose turns it is for; absent for the session as a whole."),
    },
    "value",
)
OPEN = _object(
    {
        "group_id": _field(TEXT, "Group of rollouts of one task that are compared; if absent, the session is alone."),
        "group_size": _field({"type": "integer", "minimum": 1}, "Number of rollouts; an incomplete group is closed "
                                                               "[assembler] group_deadline_s after its first record."),
        "rollout_id": _field(TEXT, "The same id and attempt name the same session. Requires group_id."),
        "rollout_index": _field(WHOLE, "Index in the group, from 0."),
        "attempt": _field(WHOLE, "Attempt at the rollout, from 0."),
        "purpose": _field({"enum": list(Purpose)}, "`train`: the group must be as large as the run's estimator needs."),
        "task_id": TEXT,
        "recipe": TEXT,
        "run_id": _field(TEXT, "If given, must be the id of the run."),
        "floor": _field(WHOLE, "Offset of agent.sessions before the session; looked up if absent."),
        "agent": _object({"name": TEXT, "version": TEXT}),
        "environment": _object({"name": TEXT, "version": TEXT}),
        "sampling": _object({"temperature": {"type": "number"}, "max_new_tokens": WHOLE, "seed": {"type": "integer"},
                             "stop_token_ids": {"type": "array", "items": WHOLE}}),
        "limits": _object({"max_context_tokens": WHOLE, "max_turns": WHOLE}),
        "min_weight_version": _field({"type": "integer", "minimum": -1}, "Minimum version of engines for its turns."),
        "pin_weight_version": _field(WHOLE, "The only weight version for its turns."),
    }
)  # fmt: skip
OPENED = _object(
    {
        "session_id": TEXT,
        "epoch": TEXT,
        "token": _field(TEXT, "Token of the judge of the session: for the reward, the finish, and turns."),
        "agent_token": _field(TEXT, "API key of the session's agent: only for turns."),
        "base_url": _field(TEXT, "Base URL for the agent: the gateway that has the session."),
        "finished": {"type": "boolean"},
    }
)
OUTCOMES = {"enum": [outcome for outcome in Outcome if outcome is not Outcome.unknown]}
FINISH = _object(
    {
        "outcome": _field(OUTCOMES, "`infra_failure` and `cancelled` never train."),
        "reason": TEXT,
        "final": _field({"type": "boolean"}, "True if no other attempt at the rollout follows."),
        "expects": _object(
            {"reward": {"type": "boolean"}, "step_rewards": WHOLE, "players": {"type": "array", "items": TEXT}},
            about="What is still to come. `players`: those with a reward of their own; no other player trains.",
        ),
        "judged": _field(
            {"oneOf": [TURN, {"type": "array", "items": TURN}]},
            "The last turn that the verdict is about, or that of each player.",
        ),
        "reward": _field(REWARD, "The verdict, if it is already known."),
    },
    "outcome",
)
TURNS = {"type": "array", "items": TURN}
FINISHED = _object(
    {"turns": _field(TURNS, "Turns that the agent acted on."), "undelivered": TURNS, "outcome": OUTCOMES}
)
SESSION = _object({"session_id": TEXT, "epoch": TEXT, "finished": {"type": "boolean"}, "outcome": TEXT,
                   "turns": {"type": "array", "items": {"type": "object"}}, "messages": {"type": "array"},
                   "last_turn": TURN, "call_seq": WHOLE, "base_url": TEXT})  # fmt: skip
REASON: Schema = {"type": "string", "description": "Recorded on the log."}
COUNT: Schema = {"type": "integer", "minimum": 1, "description": "Engines that the run's supervisor is to host."}
KIND: Schema = {"enum": ["", *get_args(EngineKind)], "description": "Empty: by [engine] kind and kinds."}
URL = _field(TEXT, "http://host:port at which gateways and its loader reach it.")
ENGINES = _object(
    {
        "engines": {
            "type": "array",
            "items": _object({"id": TEXT, "url": TEXT, "wanted": {"enum": ["", "serving", "gone"]}, "by": TEXT,
                              "state": {"enum": ["", "starting", "serving", "released", "draining", "silent", "gone"]},
                              "kind": KIND, "wanted_kind": KIND, "version": {"type": "integer"},
                              "hosted": {"type": "boolean"}, "cause": TEXT}),
        }
    }
)  # fmt: skip
FLEET: dict[str, tuple[str, Schema]] = {
    "/engines/scale": ("Set the number of hosted engines.", _object({"count": COUNT, "reason": REASON}, "count")),
    "/engines/register": (
        "Add an engine that you have started yourself.",
        _object({"url": URL, "name": TEXT, "kind": KIND, "reason": REASON}, "url"),
    ),
    "/engines/drain": (
        "Remove an engine.", _object({"engine": _field(TEXT, "Its address or id."), "reason": REASON}, "engine")
    ),
}  # fmt: skip
REFUSED = {"description": "`error.code` and `error.message` name the problem and the setting; `x-should-retry` says "
                          "whether to retry."}  # fmt: skip


def document() -> dict[str, Any]:
    """Return the body of GET /openapi.json."""
    named = {"name": "session_id", "in": "path", "required": True, "schema": TEXT}
    one = {"parameters": [named]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "turnlog: external sessions and engines", "version": version("turnlog")},
        "paths": {
            "/sessions": {"post": _verb("Open a session, or return the existing one.", OPEN, OPENED, "201", "key")},
            "/sessions/{session_id}": one | {"get": _verb("State of a session.", None, SESSION, "200", "token")},
            "/sessions/{session_id}/reward": one
            | {"post": _verb("Report the reward; the first one counts.", REWARD, {}, "201", "token")},
            "/sessions/{session_id}/finish": one
            | {"post": _verb("Finish a session; the first finish counts.", FINISH, FINISHED, "200", "token")},
            "/engines": {"get": _verb("List the engines of the run.", None, ENGINES, "200", "key")},
            **{path: {"post": _verb(what, asked, ENGINES, "202", "key")} for path, (what, asked) in FLEET.items()},
        },
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "The gateway's signing key."},
                "token": {"type": "http", "scheme": "bearer", "description": "The token of the session."},
            }
        },
    }


def _verb(summary: str, asked: Schema | None, answered: Schema, status: str, by: str) -> dict[str, Any]:
    body = {} if asked is None else {"requestBody": {"required": True, "content": _json(asked)}}
    return {
        "summary": summary, "security": [{by: []}], **body,
        "responses": {status: {"description": summary, "content": _json(answered)}, "4XX": REFUSED, "5XX": REFUSED},
    }  # fmt: skip


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
