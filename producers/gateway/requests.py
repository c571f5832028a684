"""Credentials and bodies of requests: tokens and keys, and JSON that is parsed by hand with typed errors.

There are no model classes on the hot path. A session's token carries what a gateway needs to find the session on the
log after the gateway that opened it crashed: base64url(claims).base64url(HMAC-SHA256). It is good for nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from turnlog.infra.environments.players import NAME
from turnlog.infra.run_folder import GATEWAY_KEY, kept_secret, present
from turnlog.producers.gateway.errors import BadRequest, Unauthorized
from turnlog.schemas import ids
from turnlog.schemas.events.sessions import Agent, Environment, Expects, Outcome, Verifier
from turnlog.schemas.events.tasks import Purpose, Sampling
from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than
from turnlog.schemas.types import TurnId
from turnlog.settings import GatewaySettings

LEAST = {"count": 1, "group_size": 1, "min_weight_version": -1, "max_tokens": 1, "max_completion_tokens": 1,
         "max_new_tokens": 1, "max_output_tokens": 1, "seed": -(2**63)}  # fmt: skip
"""Smallest values of integer fields that do not begin at 0."""


class Claims(NamedTuple):
    """Claims of a session's token."""

    session_id: str
    group_id: str
    floor: int
    min_weight_version: int = -1
    pin_weight_version: int | None = None
    max_context_tokens: int = 0
    """0 stands for the model's own window."""
    max_turns: int = 0
    """0 stands for no limit."""
    agent: bool = False
    """True for the agent's token, which may request turns but neither assign rewards nor finish the session."""


class SigningKeys:
    """The key that signs tokens, and the keys whose tokens are accepted. They are read on each access, since their
    files may change."""

    def __init__(self, settings: GatewaySettings, directory: Path) -> None:
        """Use the configured key, or else the one in the run's directory, which is created with mode 0600 if it is
        missing."""
        self._first = settings.signing_key or kept_secret(directory / GATEWAY_KEY)
        self._others = settings.accepted_signing_keys

    @property
    def first(self) -> bytes:
        """The key that signs."""
        return present(self._first).encode()

    @property
    def accepted_keys(self) -> tuple[bytes, ...]:
        """All accepted keys, the signing key first."""
        return self.first, *present(self._others).encode().split()


def sign(claims: Claims, key: bytes) -> str:
    """Return the token of a session."""
    *claimed, agent = claims
    # Gateways up to release v8 add up all items after the sixth. To them, the 0 that marks an agent's token adds no
    # turns, so tokens stay valid during an upgrade.
    payload = _encode_base64(orjson.dumps([*claimed, 0] if agent else claimed))
    return f"{payload}.{_mac(payload, key)}"


@lru_cache(maxsize=1024)
def verify(token: str, *keys: bytes) -> Claims:
    """Return the claims of a token that was signed with one of the keys. Raises Unauthorized."""
    payload, _, mac = token.partition(".")
    if not mac or not any(hmac.compare_digest(mac.encode(), _mac(payload, key).encode()) for key in keys):
        raise Unauthorized("the Authorization header must carry the token that POST /sessions gave: Bearer <token>")
    session_id, group_id, floor, least, pin, window, *turns = orjson.loads(_decode_base64(payload))
    return Claims(
        session_id=session_id,
        group_id=group_id,
        floor=floor,
        min_weight_version=least,
        pin_weight_version=pin,
        max_context_tokens=window,
        max_turns=sum(turns),
        agent=len(turns) > 1,
    )


def refer(turn: TurnId, text: str, key: bytes) -> str:
    """Return a signed name of a turn that a client can send back together with a text of that turn. The signature
    proves that the turn produced the text."""
    name = f"{turn.epoch}.{turn.index}"
    return f"{name}.{_mac(f'{name} {text}', _of_turns(key))}"


def resolve_reference(reference: str, text: str, *keys: bytes) -> TurnId | None:
    """Return the turn that `refer` named with one of the keys and exactly this text; None for anything else."""
    name, _, mac = reference.rpartition(".")
    if not any(hmac.compare_digest(mac.encode(), _mac(f"{name} {text}", _of_turns(key)).encode()) for key in keys):
        return None
    epoch, _, index = name.partition(".")
    return TurnId(epoch, int(index))


def _of_turns(key: bytes) -> bytes:
    """Derive a separate key, so that no turn's name is valid as a session's token."""
    return hmac.digest(key, b"turnlog turn", hashlib.sha256)


def bearer(header: str | None) -> str:
    """Return the credential of an Authorization header; "" if there is none."""
    scheme, _, credential = (header or "").partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else ""


TRACEPARENT = re.compile(r"([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


def traceparent(headers: Sequence[str]) -> str:
    """Return the span that a request's traceparent header names, without flags: 00-TRACE-SPAN-00. The result is empty
    for no header, for more than one, and for an invalid one, because a broken link is no reason to reject a turn. Of a
    version later than 00, the fields of version 00 count. Source: W3C Trace Context, 2.2 and 2.2.4."""
    found = TRACEPARENT.fullmatch(headers[0].strip()) if len(headers) == 1 else None
    if found is None or found[1] == "ff" or (found[1] == "00" and found[4] is not None):
        return ""
    return f"00-{found[2]}-{found[3]}-00"


def require_key(header: str | None, *keys: bytes) -> None:
    """Raise Unauthorized unless the header carries one of the gateway's own keys."""
    if not any(hmac.compare_digest(bearer(header).encode(), key) for key in keys):
        raise Unauthorized(
            "opening sessions and managing engines requires the gateway's signing key: Bearer <content of "
            f"{GATEWAY_KEY} in the run's directory, or [gateway] signing_key>"
        )


def _mac(payload: str, key: bytes) -> str:
    return _encode_base64(hmac.digest(key, payload.encode(), hashlib.sha256))


def _encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode_base64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """Body of POST /sessions."""

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
    """Start offset; None if the gateway reads it."""
    agent: Agent
    environment: Environment
    sampling: Sampling
    max_context_tokens: int
    max_turns: int
    min_weight_version: int
    pin_weight_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """Body of POST /sessions/{id}/reward, or the reward of a finish."""

    value: float
    components: dict[str, float]
    evidence: bytes
    """JSON text."""
    verifier: Verifier
    player: str = ""
    """Player that it is for; empty for the session as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequest:
    """Body of POST /sessions/{id}/finish."""

    outcome: Outcome
    reason: str
    final: bool
    expects: Expects
    judged: tuple[TurnId, ...]
    """Last turns of what the rewards judge: one, or that of each player."""
    reward: RewardRequest | None
    """The reward, if it is known already."""


def open_request(body: bytes, *, run_id: str, fallback: Sampling, fresh: str) -> OpenRequest:
    """Parse the request for a rollout's session. Without rollout_id, the session belongs to somebody who tries the
    gateway: it is a group of its own, named by `fresh`. Raises BadRequest."""
    values = object_of(body)
    rollout = typed_field(values, "rollout_id", str, fresh)
    attempt = typed_field(values, "attempt", int, 0)
    session = ids.session_id(rollout, attempt)
    if "rollout_id" in values and "group_id" not in values:
        raise BadRequest("a rollout's session needs group_id", param="group_id")
    try:
        purpose = Purpose(values.get("purpose", "other"))
    except ValueError:
        raise BadRequest(f"purpose must be one of {', '.join(Purpose)}", param="purpose") from None
    limits = typed_field(values, "limits", dict, {})
    return OpenRequest(
        run_id=typed_field(values, "run_id", str, run_id),
        group_id=typed_field(values, "group_id", str, session),
        session_id=session,
        task_id=typed_field(values, "task_id", str, ""),
        group_size=typed_field(values, "group_size", int, 1),
        rollout_id=rollout,
        rollout_index=typed_field(values, "rollout_index", int, 0),
        attempt=attempt,
        purpose=purpose,
        recipe=typed_field(values, "recipe", str, ""),
        floor=typed_field(values, "floor", int, None),
        agent=_agent(typed_field(values, "agent", dict, {})),
        environment=_environment(typed_field(values, "environment", dict, {})),
        sampling=_sampling(typed_field(values, "sampling", dict, {}), fallback),
        max_context_tokens=typed_field(limits, "max_context_tokens", int, 0),
        max_turns=typed_field(limits, "max_turns", int, 0),
        min_weight_version=typed_field(values, "min_weight_version", int, -1),
        pin_weight_version=typed_field(values, "pin_weight_version", int, None),
    )


def finish_request(body: bytes) -> FinishRequest:
    """Parse the body. Raises BadRequest."""
    values = object_of(body)
    legal = [outcome.value for outcome in Outcome if outcome is not Outcome.unknown]
    if values.get("outcome") not in legal:
        raise BadRequest(f"outcome must be one of {', '.join(legal)}", param="outcome")
    expects = typed_field(values, "expects", dict, {})
    reward = typed_field(values, "reward", dict, None)
    return FinishRequest(
        outcome=Outcome(values["outcome"]),
        reason=typed_field(values, "reason", str, ""),
        final=typed_field(values, "final", bool, True),
        expects=Expects(
            reward=typed_field(expects, "reward", bool, reward is not None),
            step_rewards=typed_field(expects, "step_rewards", int, 0),
            players=tuple(map(_player, typed_field(expects, "players", list, []))),
        ),
        judged=_last_turns(values.get("judged")),
        reward=None if reward is None else _reward(reward),
    )


def reward_request(body: bytes) -> RewardRequest:
    """Parse the body. Raises BadRequest."""
    return _reward(object_of(body))


def _reward(values: dict[str, Any]) -> RewardRequest:
    components = typed_field(values, "components", dict, {})
    for name, number in {"value": values.get("value"), **components}.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise BadRequest(f"{name} of a reward must be a finite number", param=name)
    by = typed_field(values, "verifier", dict, {})
    return RewardRequest(
        value=float(values["value"]),
        components={name: float(number) for name, number in components.items()},
        evidence=orjson.dumps(values.get("evidence")),
        verifier=Verifier(typed_field(by, "name", str, "outside"), typed_field(by, "version", str, "1")),
        player=_player(values["player"]) if values.get("player") else "",
    )


def _player(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadRequest("a player must be a name of 1 to 64 letters, digits, `_`, `.` or `-`", param="player")
    return name


def _last_turns(stated: Any) -> tuple[TurnId, ...]:
    """Return the turns of a field that holds one turn, a list of turns, or null."""
    if isinstance(stated, list) and stated:
        return tuple(map(_turn, stated))
    return () if stated is None else (_turn(stated),)


def _turn(values: Any) -> TurnId:
    if not isinstance(values, dict):
        raise BadRequest("judged must be dict, the epoch and index of a turn, or a list of these", param="judged")
    epoch, index = typed_field(values, "epoch", str, None), typed_field(values, "index", int, None)
    if epoch is None or index is None:
        raise BadRequest("judged must name a turn by epoch and index", param="judged")
    return TurnId(epoch, index)


def _agent(values: dict[str, Any]) -> Agent:
    return Agent(typed_field(values, "name", str, "unknown"), typed_field(values, "version", str, ""))


def _environment(values: dict[str, Any]) -> Environment:
    return Environment(
        name=typed_field(values, "name", str, "none"),
        version=typed_field(values, "version", str, ""),
        image=typed_field(values, "image", str, None),
        data_snapshot=typed_field(values, "data_snapshot", str, None),
        root_sha256=typed_field(values, "root_sha256", str, None),
        policy_sha256=typed_field(values, "policy_sha256", str, None),
        tools=_versions(values, "tools"),
        packages=_versions(values, "packages"),
        hidden=_paths(typed_field(values, "hidden", list, [])),
    )


MOST_HIDDEN = 256
"""Maximum number of hidden paths of a session; detectors compare each with every path that its agent names."""


def _paths(values: list[Any]) -> tuple[str, ...]:
    if len(values) > MOST_HIDDEN or not all(isinstance(path, str) and path.strip("/") for path in values):
        says = f"environment.hidden must list at most {MOST_HIDDEN} files and folders"
        raise BadRequest(says, param="environment")
    return tuple(values)


def _versions(values: dict[str, Any], field: str) -> dict[str, str]:
    named = typed_field(values, field, dict, {})
    if not all(isinstance(version, str) for version in named.values()):
        raise BadRequest(f"environment.{field} must map names to versions", param="environment")
    return dict(named)


def _sampling(values: dict[str, Any], fallback: Sampling) -> Sampling:
    stops = typed_field(values, "stop_token_ids", list, list(fallback.stop_token_ids))
    if not all(type(stop) is int and 0 <= stop < 2**31 for stop in stops):
        raise BadRequest("sampling.stop_token_ids must be token ids: integers from 0 on", param="sampling")
    temperature = values.get("temperature", fallback.temperature)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < 100:
        raise BadRequest("sampling.temperature must be a number from 0 on", param="sampling")
    new_tokens = typed_field(values, "max_new_tokens", int, fallback.max_new_tokens)
    seed = typed_field(values, "seed", int, None)
    return Sampling(
        temperature=float(temperature), max_new_tokens=new_tokens, stop_token_ids=tuple(stops), seed=seed
    )  # fmt: skip


def object_of(body: bytes) -> dict[str, Any]:
    """Return a body that must be a JSON object. Raises BadRequest."""
    try:
        values = orjson.loads(body)
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
            orjson.dumps(values)  # which writes MAX_DEPTH levels, and is quicker than counting them
    except (orjson.JSONDecodeError, orjson.JSONEncodeError) as error:
        if deeper_than(body):
            raise BadRequest(f"the body is nested deeper than {MAX_DEPTH} levels: send deeper parts as text") from None
        raise BadRequest(f"the body must be a JSON object: {error}") from None
    if not isinstance(values, dict):
        raise BadRequest("the body must be a JSON object")
    return values


def typed_field(values: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a field of exactly this type; null and absent give `default`. Raises BadRequest."""
    value = values.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise BadRequest(f"{name} must be {kind.__name__}, got {type(value).__name__}", param=name)
    if isinstance(value, int) and not LEAST.get(name, 0) <= value < 2**63:
        raise BadRequest(f"{name} must be from {LEAST.get(name, 0)} to 2^63 - 1, got {value}", param=name)
    return value
