"""The runner's client of the gateway: sessions and chat completions over HTTP.

GatewayClientError
├── GatewayUnavailable   no answer for longer than runner.gateway_patience_s
│   └── EnginesBusy      408, 425, 429, 503, or 502 and 504 from a proxy in front: turns wait until it is over
├── GatewayFailed        any other 5xx, an unknown session, an answer that is no completion: an infrastructure failure
├── GatewayRefused       401, 403: the key or token is wrong; the process must end
├── ContextExceeded      the conversation does not fit the context window: the session is truncated
├── RequestRejected      any other 4xx: the agent requested something impossible
├── OpponentMissing      a player's model is served by no side engine
├── SessionOver          the session is finished already, or was erased
└── SessionMoved            another gateway owns the session now: open it again
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from turnlog.infra.environments.episodes import Message
from turnlog.infra.environments.sources import packages_of
from turnlog.infra.environments.tasks import Task
from turnlog.infra.environments.tools import versions
from turnlog.infra.roles import Unreachable
from turnlog.infra.roles.credentials import CredentialKeys
from turnlog.infra.roles.http_clients import for_turns
from turnlog.infra.roles.tls import trusting
from turnlog.infra.sandbox_root import RootError, root_sha256
from turnlog.producers.gateway.profiles import PATH_HEADER
from turnlog.producers.gateway.requests import SigningKeys
from turnlog.sandbox_settings import LOCAL, EgressSettings
from turnlog.schemas.events import Agent, Outcome, RolloutRequested, SandboxSpec
from turnlog.schemas.events.sessions import Environment
from turnlog.schemas.events.turns import CUT_OFF
from turnlog.schemas.ids import environment_digest
from turnlog.schemas.types import TurnId
from turnlog.settings import Settings

log = logging.getLogger(__name__)


MOST_ENVIRONMENTS = 4096
"""Number of different surroundings that are cached."""


class Environments:
    """Facts about a session's sandbox that its task does not state: versions of root, policy and tools. They are
    computed once per process for tasks with equal surroundings, because hashing an image takes seconds the first
    time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: dict[str, Environment] = {}
        """Result by everything of a task that it depends on."""
        self._turn = asyncio.Lock()

    async def of(self, task: Task, recipe: str = "") -> Environment:
        """Return the Environment for SessionStarted of a task of this source. Values that the task itself states are
        kept. Raises UnknownTool, ToolOfferError, RecipeError."""
        key = repr((recipe, task.environment, task.call_sandbox, task.workspace, task.sandbox_tools))
        async with self._turn:
            if key not in self._known:
                if len(self._known) >= MOST_ENVIRONMENTS:
                    self._known.clear()
                self._known[key] = await self._describe(task, recipe)
            return self._known[key]

    async def _describe(self, task: Task, recipe: str) -> Environment:
        stated, spec, workspace = task.environment, task.call_sandbox, task.workspace
        return dataclasses.replace(
            stated,
            image=stated.image or spec.image,
            data_snapshot=stated.data_snapshot or (workspace.sha256 if workspace else None),
            root_sha256=stated.root_sha256 or await self._root(stated.name, spec),
            policy_sha256=stated.policy_sha256 or policy_sha256(spec, self._settings.egress),
            tools=stated.tools or await asyncio.to_thread(versions, task.sandbox_tools),
            packages=stated.packages or (await asyncio.to_thread(packages_of, recipe) if recipe else {}),
        )

    async def _root(self, name: str, spec: SandboxSpec) -> str | None:
        if spec.backend not in LOCAL:
            return None  # its calls name their root in environment_sha256 of ToolCallStarted
        try:
            return await asyncio.to_thread(root_sha256, self._settings.sandbox.image_folder, spec.image)
        except (RootError, OSError) as error:  # the image may exist on the sandbox workers' machines only
            log.warning("sessions of recipe %s are recorded without root_sha256: %s", name, error)
            return None


def policy_sha256(spec: SandboxSpec, egress: EgressSettings) -> str:
    """Return the hash of backend, limits and network rules. Environment variables count by name only, secrets not at
    all."""
    about = {
        "backend": spec.backend,
        "network": spec.network,
        "allow": list(spec.allow),
        "limits": dataclasses.asdict(spec.limits),
        "env": sorted(spec.env),
    }
    rules = dataclasses.asdict(dataclasses.replace(egress, signing_key="")) if spec.network != "none" else None
    return environment_digest({**about, "egress": rules})


log = logging.getLogger(__name__)


class NoAnswer(Exception):
    """The message names the URL and what happened to the connection."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A complete HTTP response."""

    url: str
    status: int
    content: bytes

    @property
    def text(self) -> str:
        """Start of the body, for messages."""
        return self.content[:300].decode(errors="replace")


class Connections:
    """Pool of as many connections as there were requests at once."""

    def __init__(self, *, connect_s: float, answer_s: float, trusted: ssl.SSLContext | None = None) -> None:
        """`answer_s` is the longest silence in seconds while an answer is awaited; `trusted` verifies https origins."""
        self._trusted = trusted
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=answer_s)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close idle connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> HttpResponse:
        """Send a request, and read the whole answer. A request that is cancelled closes its connection, so that the
        gateway sees us disconnect. Raises NoAnswer."""
        if self._session is None:
            self._session = for_turns(self._trusted)
        try:
            async with self._session.request(
                method, url, headers=headers, data=content, timeout=self._timeout, allow_redirects=False
            ) as answer:
                return HttpResponse(url, answer.status, await answer.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NoAnswer(f"{url}: {type(error).__name__} {error}".rstrip()) from error


NO_ENGINE: Final = "engines_unavailable"
"""Error code of a turn that no engine could serve."""
WANTING = frozenset({NO_ENGINE, "log_unavailable"})
"""Error codes of turns that no engine could serve or no log could accept."""
AGENT: Final = Agent("turnlog-white-box", "1")
COMPLETIONS: Final = "/v1/chat/completions"
CONNECT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0


class GatewayClientError(Exception):
    """Base class of the tree in this module's docstring."""


class GatewayUnavailable(GatewayClientError, Unreachable):
    """Remedy: check that a gateway runs at [gateway] url, with an engine behind it."""


class EnginesBusy(GatewayUnavailable):
    """No engine serves the requested weights, the log accepts no record, the session sends too many requests, or a
    proxy does not reach the gateway."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        """Error code of the gateway; empty for a proxy's answer."""


class GatewayFailed(GatewayClientError):
    """The gateway or an engine failed on this request."""


class GatewayRefused(GatewayClientError):
    """Runner and gateway must share [gateway] signing_key, or the run's directory."""


class ContextExceeded(GatewayClientError):
    """The context window is full."""


class RequestRejected(GatewayClientError):
    """The gateway cannot accept this request as it is."""


class OpponentMissing(GatewayClientError):
    """Remedy: name the engine of the model in [gateway] side_engines, and check that it runs."""


class SessionOver(GatewayClientError):
    """Nothing can be added to the session."""


class SessionMoved(GatewayClientError):
    """The session moved to another gateway."""


@dataclass(slots=True)
class OpenSession:
    """An open session and its tokens."""

    session_id: str
    base_url: str
    """Root URL of the gateway that owns it. It follows the session when that gateway is gone."""
    token: str = dataclasses.field(repr=False)
    """Token for the session's end, and for all else but turns."""
    agent_token: str = dataclasses.field(repr=False)
    """Token for the session's turns; the only one that an agent gets."""


@dataclass(frozen=True, slots=True)
class AgentState:
    """State on the log of one of several agents of a session."""

    messages: tuple[Message, ...]
    """The agent's conversation up to its last turn."""
    finish_reason: str
    """Finish reason of the last turn."""
    last_turn: TurnId


@dataclass(frozen=True, slots=True)
class Speaker:
    """Speaker of a turn, in a session of several."""

    path: str
    """Agent path of the turn."""
    model: str = ""
    """Model that answers, which a side engine serves; empty for the policy."""


@dataclass(frozen=True, slots=True)
class SessionState:
    """State of a session on the log."""

    finished: bool
    outcome: Outcome
    messages: tuple[Message, ...]
    """The conversation up to its last turn; empty before the first."""
    finish_reason: str
    """Finish reason of the last turn; empty before the first."""
    last_turn: TurnId | None
    """Last turn; None before the first."""
    turns: int = 0
    """Number of recorded turns, in all lineages."""
    turn_ids: tuple[TurnId, ...] = ()
    """Ids of the recorded turns."""
    reason: str = ""
    """Reason of the session's end."""
    refused: str = ""
    """Error code of the last request for a turn if the request was refused for its content; else empty."""
    failed: str = ""
    """Error code of the last turn if it failed for another reason than its content; else empty."""
    own_s: float = 0.0
    """Seconds in which engines sampled for its completed turns."""
    running_s: float = 0.0
    """Seconds in which engines have sampled for the running turns."""
    waited_s: float = 0.0
    """Seconds in which turns, recorded or running, waited for an engine."""
    taken_over: bool = False
    """True if another gateway owned it before."""
    silent: bool = False
    """True if it has no turn at the gateway that owns it now."""
    players: Mapping[str, AgentState] | None = None
    """Agent path -> state of each player; None at a gateway of an earlier release, which does not know players."""

    @property
    def failed_by_us(self) -> bool:
        """True if the last request for a turn may have failed for lack of a server, which may have ended an agent that
        requests its turns itself."""
        return self.failed in WANTING or (self.taken_over and self.silent)


@dataclass(frozen=True, slots=True)
class Completion:
    """A turn as the agent receives it."""

    message: Message
    """The assistant message. Its tool calls carry the ids by which the log knows them (schemas.ids.call_id)."""
    finish_reason: str
    turn: TurnId
    own_s: float = 0.0
    """Seconds in which an engine sampled for it."""


class GatewayClient:
    """Client of the gateway; one per process. Use as an async context manager."""

    def __init__(self, settings: Settings) -> None:
        self.url = settings.gateway.url.rstrip("/")
        """URL at which any gateway is reached."""
        self.model = settings.model.name
        """Name of the policy."""
        self._environments = Environments(settings)
        self._patience_s = settings.runner.gateway_patience_s
        self._credentials = settings.sandbox.credential_key, Path(settings.run.directory)
        self._keys = SigningKeys(settings.gateway, Path(settings.run.directory))
        self._http = Connections(
            connect_s=CONNECT_S,
            answer_s=settings.engine.request_timeout_s + 30.0,
            trusted=trusting(self.url, settings.gateway.ca_file, "gateway"),
        )

    async def __aenter__(self) -> GatewayClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections; another request opens new ones."""
        await self._http.close()

    async def open(self, request: RolloutRequested, task: Task, attempt: int) -> OpenSession:
        """Open the session of this attempt, or return the one that is open: idempotent per (rollout_id, attempt).
        Raises GatewayClientError, and UnknownTool or ToolOfferError if the environment names a tool that nothing offers
        here."""
        environment = await self._environments.of(task, request.recipe)
        agent, limits = task.agent, {"max_context_tokens": request.limits.max_context_tokens}
        if agent is not None:  # the loop counts its own turns
            limits["max_turns"] = request.limits.max_turns
        body = {
            "run_id": request.run_id,
            "group_id": request.group_id,
            "task_id": request.task_id,
            "group_size": request.group_size,
            "rollout_id": request.rollout_id,
            "rollout_index": request.rollout_index,
            "attempt": attempt,
            "purpose": request.purpose.value,
            "recipe": request.recipe,
            "floor": request.floor,
            "agent": Agent(agent.name, agent.version) if agent else AGENT,
            "environment": environment,
            "sampling": request.sampling,
            "limits": limits,
            "min_weight_version": request.min_weight_version,
            "pin_weight_version": request.pin_weight_version,
        }
        answer = await self._send("POST", f"{self.url}/sessions", self._keys.first.decode(), body)
        opened = orjson.loads(answer.content)
        root, token = _root(opened.get("base_url") or self.url), opened["token"]
        # Gateways up to release v8 return one token for everything.
        return OpenSession(opened["session_id"], root, token, opened.get("agent_token", token))

    def seal_token(self, session: OpenSession, call_id: str) -> str:
        """Return the agent's token, sealed for the sandbox worker of this call."""
        return CredentialKeys(*self._credentials).encrypt_token(session.agent_token, call_id)

    async def state(self, session: OpenSession) -> SessionState:
        """Return the session's state. Raises GatewayClientError."""
        return _state(await self._of(session, "GET", f"/sessions/{session.session_id}"))

    async def glimpse(self, session: OpenSession) -> SessionState | None:
        """Return the session's state after a single request; None if no gateway can report it now."""
        try:
            return _state(await self._once("GET", f"{session.base_url}/sessions/{session.session_id}", session.token))
        except (NoAnswer, GatewayClientError) as error:
            log.info("the state of session %s cannot be read now: %s", session.session_id, error)
            return None

    async def complete(
        self, session: OpenSession, messages: list[Message], tools: Any, *, step: int, speaker: Speaker | None = None
    ) -> Completion:
        """Return the next turn, of `speaker` in a session of several players. The same step of a speaker is the same
        turn, however often it is requested. A gateway of release v2 returns a turn that it cut off as an answer;
        another one is then requested with another body. While the gateway answers that no engine serves, or that the
        log accepts no record, the request is repeated without a limit, because waiting costs the session nothing and
        beginning anew would cost its turns. Only a side engine is given up after the patience. Raises
        GatewayClientError."""
        model = speaker.model if speaker else ""
        body: dict[str, Any] = {"model": model or self.model, "messages": messages}
        if tools:
            body["tools"] = tools
        name = f"{session.session_id}:{speaker.path}:{step}" if speaker else f"{session.session_id}:{step}"
        headers, parts = {"idempotency-key": name}, 0
        if speaker is not None:
            headers[PATH_HEADER] = speaker.path
        while True:
            answer = await self._of(
                session, "POST", COMPLETIONS, body, headers=headers, busy_s=math.inf, opponent=model != ""
            )
            if (turn := _completion(answer)).finish_reason not in CUT_OFF:
                return turn
            parts += 1
            headers["idempotency-key"], body["metadata"] = f"{name}:{parts}", {"again": parts}

    async def finish(
        self,
        session: OpenSession,
        outcome: Outcome,
        reason: str,
        *,
        final: bool,
        reward: bool,
        judged: TurnId | Sequence[TurnId] | None,
        step_rewards: int = 0,
        players: Sequence[str] = (),
    ) -> None:
        """Finish the session; idempotent. `reward`: a reward is on the log or will be. `judged`: the last turn of what
        it judges, or of each player, on which the agent acted whether or not its delivery is known. `step_rewards`:
        number of turns that have a reward of their own. `players`: those that have."""
        expects: dict[str, Any] = {"reward": reward, "step_rewards": step_rewards}
        if players:  # a gateway of an earlier release does not know the field
            expects["players"] = list(players)
        named: Any = None
        if judged is not None:
            named = _turn_name(judged) if isinstance(judged, TurnId) else [_turn_name(turn) for turn in judged]
        body = {"outcome": outcome.value, "reason": reason, "final": final, "expects": expects, "judged": named}
        await self._of(session, "POST", f"/sessions/{session.session_id}/finish", body)

    async def _of(
        self, session: OpenSession, method: str, path: str, body: Any = None, *,
        headers: Mapping[str, str] | None = None, busy_s: float | None = None, opponent: bool = False,
    ) -> HttpResponse:  # fmt: skip
        """Send a request about an open session to the gateway that owns it. If that gateway does not answer, or has
        lost the session, the one behind [gateway] url names the owner, or takes the session over. `busy_s` is the time
        for which EnginesBusy is waited out, if it differs from the patience. With `opponent`, a side engine answers,
        and OpponentMissing is raised if it serves nobody for longer than the patience. Raises GatewayClientError."""
        patience, busy = RetryBackoff(self._patience_s), RetryBackoff(self._patience_s if busy_s is None else busy_s)
        absent = RetryBackoff(self._patience_s, OpponentMissing)
        while True:
            try:
                token = session.agent_token if path.startswith("/v1/") else session.token
                return await self._once(method, session.base_url + path, token, body, headers)
            except EnginesBusy as error:
                await (absent if opponent and error.code == NO_ENGINE else busy).after(str(error))
            except (NoAnswer, SessionMoved) as error:
                if isinstance(error, SessionMoved) and session.base_url == self.url:
                    raise
                await patience.after(str(error))
                await self._find(session)

    async def _find(self, session: OpenSession) -> None:
        """Find out which gateway owns the session now. Raises GatewayClientError."""
        if session.base_url == self.url:
            return
        try:
            answer = await self._once("GET", f"{self.url}/sessions/{session.session_id}", session.token)
        except (NoAnswer, SessionMoved):
            session.base_url = self.url
        else:
            session.base_url = _root(orjson.loads(answer.content).get("base_url") or self.url)

    async def _send(self, method: str, url: str, credential: str, body: Any) -> HttpResponse:
        """Send a request, and repeat it while nobody answers; all our requests are idempotent. Raises
        GatewayClientError."""
        patience = RetryBackoff(self._patience_s)
        while True:
            try:
                return await self._once(method, url, credential, body)
            except (NoAnswer, EnginesBusy) as error:
                await patience.after(str(error))

    async def _once(
        self, method: str, url: str, credential: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Send a request once. Raises NoAnswer, GatewayClientError."""
        sent = {"authorization": f"Bearer {credential}", "content-type": "application/json", **(headers or {})}
        content = None if body is None else orjson.dumps(body)
        answer = await self._http.request(method, url, sent, content)
        if answer.status < HTTPStatus.BAD_REQUEST:
            return answer
        raise refusal(answer)


class RetryBackoff:
    """Growing pauses between repeats, up to a total time."""

    def __init__(self, limit_s: float, error: type[GatewayClientError] = GatewayUnavailable) -> None:
        self._limit_s, self._error = limit_s, error
        self._since: float | None = None
        """Time of the first trouble."""
        self._pause_s = FIRST_PAUSE_S

    async def after(self, trouble: str) -> None:
        """Pause before the next repeat. Raises the error once the total time is exceeded."""
        now = asyncio.get_running_loop().time()
        self._since = now if self._since is None else self._since
        if now - self._since > self._limit_s:
            raise self._error(f"{trouble}; gave up after {self._limit_s:g} s ([runner] gateway_patience_s)")
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


def _state(answer: HttpResponse) -> SessionState:
    """Parse a session's state. Gateways of earlier releases omit some fields."""
    found = orjson.loads(answer.content)
    turns, last, running = found["turns"], found["last_turn"], found.get("running", ())
    reasons = {(turn["epoch"], turn["index"]): turn["finish_reason"] for turn in turns}
    return SessionState(
        finished=found["finished"],
        outcome=Outcome(found["outcome"]) if found["outcome"] else Outcome.unknown,
        messages=tuple(found["messages"]),
        finish_reason=reasons[last["epoch"], last["index"]] if last else "",
        last_turn=TurnId(last["epoch"], last["index"]) if last else None,
        turns=len(turns),
        turn_ids=tuple(TurnId(turn["epoch"], turn["index"]) for turn in turns),
        reason=found["reason"] or "",
        refused=found.get("refused", ""),
        failed=found.get("failed", ""),
        own_s=math.fsum(turn.get("own_s", 0.0) for turn in turns if turn["finish_reason"] not in CUT_OFF),
        running_s=math.fsum(turn["own_s"] for turn in running),
        waited_s=math.fsum(turn.get("waited_s", 0.0) for turn in (*turns, *running)),
        taken_over=found.get("taken_over", False),
        silent=all(turn["epoch"] != found["epoch"] for turn in turns),
        players=_players(found["players"]) if "players" in found else None,
    )


def _players(found: Sequence[Mapping[str, Any]]) -> dict[str, AgentState]:
    return {
        one["agent_path"]: AgentState(
            tuple(one["messages"]), one["finish_reason"], TurnId(one["last_turn"]["epoch"], one["last_turn"]["index"])
        )
        for one in found
    }


def _turn_name(turn: TurnId) -> dict[str, object]:
    return {"epoch": turn.epoch, "index": turn.index}


def _completion(answer: HttpResponse) -> Completion:
    """Parse a chat completion. Raises GatewayFailed if the answer is none."""
    try:
        body = orjson.loads(answer.content)
        about = body["turnlog"]
        return Completion(
            body["choices"][0]["message"],
            about["finish_reason"],
            TurnId(about["epoch"], about["index"]),
            float(about.get("own_s", 0.0)),
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise GatewayFailed(f"{answer.url}: no chat completion: {type(error).__name__}: {error}") from error


def refusal(answer: HttpResponse) -> GatewayClientError:
    """Return the typed error of an answer with status 400 or more."""
    message = f"{answer.url} answered {answer.status}: {answer.text}"
    match answer.status, _code(answer):
        case _, "context_length_exceeded":
            return ContextExceeded(message)
        case _, ("session_finished" | "session_erased"):
            return SessionOver(message)
        case _, "no_side_engine":
            return OpponentMissing(message)
        case _, "epoch_lost":
            return SessionMoved(message)
        case ((401 | 403), _):
            return GatewayRefused(message)
        case 404, _:
            return GatewayFailed(message)
        case _, "weight_version_gone":
            return GatewayFailed(message)
        case ((408 | 425 | 429 | 503), _) | ((502 | 504), ""):  # without a code it comes from a proxy in front
            return EnginesBusy(message, _code(answer))
        case status, _ if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return GatewayFailed(message)
        case _:
            return RequestRejected(message)


def _code(answer: HttpResponse) -> str:
    """Return `error.code` of an answer in OpenAI's shape; empty if it has none."""
    try:
        return str(orjson.loads(answer.content)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


def _root(base_url: str) -> str:
    """Return the gateway's root URL for an OpenAI base URL."""
    return base_url.rstrip("/").removesuffix("/v1")
