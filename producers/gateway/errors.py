"""Errors that the gateway answers with instead of a turn, in the error shape of the API that the client uses:

GatewayError
├── BadRequest            400 the body or one of its fields cannot be used
│   ├── GroupTooSmall     the run's estimator compares more rollouts than the group has
│   ├── PrefillNotServed  the last message is the assistant's and cannot be continued
│   ├── ConstraintRefused a field would constrain what is sampled
│   ├── NoSideEngine      a player names a model that no side engine serves
│   └── UnknownPrevious   previous_response_id names no turn of the session
├── ImagesNotServed       400 the model, or its template, takes no images
├── ToolsNotServed        400 the model's chat template does not write calls or their results
├── TemplateSpent         400 the model's chat template loops or multiplies text for these messages
├── StrayImageToken       400 the model or a message wrote an image token, which no engine accepts beside images
├── ContextOverflow       400 the prompt leaves no room in the context window
├── Unauthorized          401 the token is missing, forged, or of another session
├── AgentsToken           403 the agent's own token tries to assign a reward or to finish the session
├── TooSlow               408 the body did not arrive in time
├── TooLarge              413 the body is longer than [gateway] max_body_bytes, or holds too many JSON values
├── TooMany               429 the session requests more turns than [gateway] allows
├── EnginesRefused        400 the requested change of engines is impossible: no such engine, no address, none hosted
├── SessionNotFound        404 the log holds no such session
├── ThreadNotHeld         404 a request continues an earlier answer without the messages before it
├── UnknownResponse       404 the id names no turn of the session
├── SessionEnded          400 the session is finished
├── TurnsSpent            400 the session has used the turns that it was opened for
├── KeyReused             409 an Idempotency-Key was sent again with another body
├── WebSocketNotServed    426 turns are requested by POST
├── ErasedSession         410 the session was erased: nothing is written for it any more
├── EpochLost             409 another gateway owns the session and cannot be reached
├── EngineFailed          502 the engine refused, or returned something that cannot be recorded
├── NoEngine              503 no engine may serve this turn in time
├── VersionGone           503 no engine will serve the weight version that the session is pinned to
└── NotRecorded           503 the log did not accept the turn, or could not be read
"""

from __future__ import annotations

from typing import Any, ClassVar

from prometheus_client import Counter

ERRORS = Counter("turnlog_gateway_errors", "Requests answered with an error", ("code",))


class GatewayError(Exception):
    """Base class of the tree in this module's docstring."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retry: ClassVar[bool] = False
    """True if the same request may succeed later."""
    retry_after_ms: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the error response, in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(GatewayError):
    """The message names the field and what it must be."""

    status, type, code = 400, "invalid_request_error", "invalid_request"


class GroupTooSmall(BadRequest):
    """The message names the estimator and the group size that it needs."""

    code = "group_too_small"


class PrefillNotServed(BadRequest):
    """The message gives the reason why the assistant's last message cannot be continued."""

    code = "prefill_not_served"


class ConstraintRefused(BadRequest):
    """The message names the field, and the setting that ignores it instead."""

    code = "constraint_refused"


class NoSideEngine(BadRequest):
    """The message names the model, and the setting that names its engines."""

    code = "no_side_engine"


class UnknownPrevious(BadRequest):
    """Uses OpenAI's own code and status, on which clients send the whole conversation instead."""

    code = "previous_response_not_found"


class ImagesNotServed(GatewayError):
    """The message names what the model lacks."""

    status, type, code = 400, "invalid_request_error", "images_not_served"


class ToolsNotServed(GatewayError):
    """The message names what the chat template omits from a conversation."""

    status, type, code = 400, "invalid_request_error", "tools_not_served"


class TemplateSpent(GatewayError):
    """The message names the resource of which the chat template uses too much."""

    status, type, code = 400, "invalid_request_error", "template_unbounded"


class StrayImageToken(GatewayError):
    """The session cannot continue: an engine would look for an image for that token."""

    status, type, code = 400, "invalid_request_error", "stray_image_token"


class ContextOverflow(GatewayError):
    """The message names the prompt's length and the window, both in tokens. Where the length was not counted, it is a
    lower bound."""

    status, type, code = 400, "invalid_request_error", "context_length_exceeded"

    def __init__(self, prompt_tokens: int, window: int, *, counted: bool = True) -> None:
        take = f"take {'' if counted else 'at least '}{prompt_tokens}"
        super().__init__(
            f"This model's maximum context length is {window} tokens; the messages {take} of them",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.window = window


class Unauthorized(GatewayError):
    """The message names the key that belongs here, never the one that was sent."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class AgentsToken(GatewayError):
    """The message names the token that may assign rewards."""

    status, type, code = 403, "permission_error", "agent_token_refused"


class TooSlow(GatewayError):
    """The message names the limit and its setting."""

    status, type, code = 408, "invalid_request_error", "request_timeout"
    retry = True


class TooMany(GatewayError):
    """The message names the limit and its setting."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"
    retry = True
    retry_after_ms = 1000


class TooLarge(GatewayError):
    """The message names the limit and its setting."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class EnginesRefused(GatewayError):
    """The message gives the same reason as `turnlog engines`."""

    status, type, code = 400, "invalid_request_error", "engines_refused"


class SessionNotFound(GatewayError):
    """The session was never started, or the token names a wrong start offset (`floor`)."""

    status, type, code = 404, "invalid_request_error", "session_not_found"


class UnknownResponse(GatewayError):
    """The session has no completed turn with this id, or the turn was deleted."""

    status, type, code = 404, "invalid_request_error", "response_not_found"


class ThreadNotHeld(GatewayError):
    """The client must send the whole conversation; the SDKs do so by themselves."""

    status, type, code = 404, "invalid_request_error", "thread_not_found"


class SessionEnded(GatewayError):
    """A finished session takes no further turn. The status is not 409, because clients retry that."""

    status, type, code = 400, "invalid_request_error", "session_finished"


class ErasedSession(GatewayError):
    """An operator has erased the session (`turnlog erase`)."""

    status, type, code = 410, "invalid_request_error", "session_erased"


class TurnsSpent(GatewayError):
    """The message names the limit, which was set by whoever opened the session."""

    status, type, code = 400, "invalid_request_error", "turns_spent"


class KeyReused(GatewayError):
    """An Idempotency-Key belongs to one body."""

    status, type, code = 409, "invalid_request_error", "idempotency_key_reused"


class WebSocketNotServed(GatewayError):
    """The message names what is served instead. On this status Codex falls back to POST without a retry."""

    status, type, code = 426, "invalid_request_error", "websocket_not_served"


class EpochLost(GatewayError):
    """The client must open the session again."""

    status, type, code = 409, "server_error", "epoch_lost"
    retry = True


class EngineFailed(GatewayError):
    """The message names the engine and its answer."""

    status, type, code = 502, "server_error", "engine_failed"
    retry = True


class NoEngine(GatewayError):
    """The message names what the gateway waited for."""

    status, type, code = 503, "server_error", "engines_unavailable"
    retry = True
    retry_after_ms = 2000


class VersionGone(NoEngine):
    """Every engine has later weights, and engines never load earlier ones."""

    code = "weight_version_gone"
    retry = False


class NotRecorded(GatewayError):
    """The log or the blob store is unavailable. A turn that was sampled meanwhile is not on the log, so it never
    happened: the client must send the request again."""

    status, type, code = 503, "server_error", "log_unavailable"
    retry = True
    retry_after_ms = 2000
