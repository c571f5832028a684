"""The gateway: sessions, the APIs of `dialects`, token-in token-out, every turn on the log before its last byte.

What the gateway answers instead of a turn, in the error shape of the API that was asked.

GatewayError
├── BadRequest            400 the body or a field of it cannot be used
│   ├── GroupTooSmall    the run's estimator compares more rollouts than the group has
│   ├── PrefillNotServed  the last message is the assistant's and cannot be left open
│   ├── ConstraintRefused a field would constrain what is sampled
│   └── UnknownPrevious   previous_response_id names no turn of the session
├── ImagesNotServed       400 the model, or its template, takes no images
├── ToolsNotServed        400 the model's chat template does not write calls or their results
├── TemplateSpent         400 the model's chat template loops or multiplies text for these messages
├── StrayImageToken       400 the model or a message wrote an image token, and no engine takes that beside images
├── ContextOverflow       400 the prompt leaves no room in the context window
├── Unauthorized          401 no, a forged or a foreign token
├── AgentsToken           403 the agent's own token asks for a verdict or for the end
├── TooSlow               408 the body did not come within [gateway] request_s
├── TooLarge              413 the body is longer than [gateway] max_body_bytes, or holds too many JSON values
├── TooMany               429 the session asks for more turns than [gateway] allows
├── EnginesRefused        400 what is asked of engines cannot be: no such engine, no address, none hosted
├── UnknownSession        404 the log holds no such session
├── ThreadNotHeld         404 a request is to go on where an answer ended, without the messages before it
├── UnknownResponse       404 the id names no turn of the session
├── SessionEnded          400 the session is finished
├── TurnsSpent            400 the session has had the turns that it was opened for
├── KeyReused             409 an Idempotency-Key came back with another body
├── WebSocketNotServed    426 turns are asked for by POST
├── EpochLost             409 another gateway owns the session and cannot be reached
├── EngineFailed          502 the engine refused, or gave what cannot be recorded
├── NoEngine              503 no engine may serve this turn in time
├── VersionGone           503 no engine will serve the weight version that the session is pinned to
└── NotRecorded           503 the log did not take the turn, or could not be read
"""

from __future__ import annotations

from typing import Any, ClassVar

from prometheus_client import Counter

ERRORS = Counter("turnlog_gateway_errors", "Requests answered with an error", ("code",))


class GatewayError(Exception):
    """Base of the tree above."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retry: ClassVar[bool] = False
    """Whether the same request may succeed later."""
    retry_after_ms: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(GatewayError):
    """Names the field and what it must be."""

    status, type, code = 400, "invalid_request_error", "invalid_request"


class GroupTooSmall(BadRequest):
    """Names the estimator and how many it needs."""

    code = "group_too_small"


class PrefillNotServed(BadRequest):
    """Says what keeps the assistant's last message from being continued."""

    code = "prefill_not_served"


class ConstraintRefused(BadRequest):
    """Names the field, and the setting by which it is ignored."""

    code = "constraint_refused"


class UnknownPrevious(BadRequest):
    """OpenAI's own code and status, by which clients send the whole conversation instead."""

    code = "previous_response_not_found"


class ImagesNotServed(GatewayError):
    """Says what the model lacks."""

    status, type, code = 400, "invalid_request_error", "images_not_served"


class ToolsNotServed(GatewayError):
    """Says what the chat template drops of a conversation."""

    status, type, code = 400, "invalid_request_error", "tools_not_served"


class TemplateSpent(GatewayError):
    """Says what the chat template takes too much of."""

    status, type, code = 400, "invalid_request_error", "template_unbounded"


class StrayImageToken(GatewayError):
    """The session cannot go on: an engine would look for an image of that token."""

    status, type, code = 400, "invalid_request_error", "stray_image_token"


class ContextOverflow(GatewayError):
    """Names the prompt's length and the window, both in tokens; a length that nobody counted by what it is at least."""

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
    """Says which key belongs here, never which one came."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class AgentsToken(GatewayError):
    """Names the token that judges."""

    status, type, code = 403, "permission_error", "agent_token_refused"


class TooSlow(GatewayError):
    """Names the limit and its setting."""

    status, type, code = 408, "invalid_request_error", "request_timeout"
    retry = True


class TooMany(GatewayError):
    """Names the limit and its setting."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"
    retry = True
    retry_after_ms = 1000


class TooLarge(GatewayError):
    """Names the limit and its setting."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class EnginesRefused(GatewayError):
    """Says why, as `turnlog engines` does."""

    status, type, code = 400, "invalid_request_error", "engines_refused"


class UnknownSession(GatewayError):
    """The session was never started, or its floor is wrong."""

    status, type, code = 404, "invalid_request_error", "session_not_found"


class UnknownResponse(GatewayError):
    """No whole turn of the session has this id, or it was deleted."""

    status, type, code = 404, "invalid_request_error", "response_not_found"


class ThreadNotHeld(GatewayError):
    """Send the whole conversation: the SDKs do it by themselves."""

    status, type, code = 404, "invalid_request_error", "thread_not_found"


class SessionEnded(GatewayError):
    """Nothing can be added to a finished session. No 409: clients would ask again."""

    status, type, code = 400, "invalid_request_error", "session_finished"


class TurnsSpent(GatewayError):
    """Names the limit, which whoever opened the session has set."""

    status, type, code = 400, "invalid_request_error", "turns_spent"


class KeyReused(GatewayError):
    """One key, one body."""

    status, type, code = 409, "invalid_request_error", "idempotency_key_reused"


class WebSocketNotServed(GatewayError):
    """Says what is served instead. Codex falls back to POST by this status, without asking again."""

    status, type, code = 426, "invalid_request_error", "websocket_not_served"


class EpochLost(GatewayError):
    """Open the session again."""

    status, type, code = 409, "server_error", "epoch_lost"
    retry = True


class EngineFailed(GatewayError):
    """Names the engine and what it said."""

    status, type, code = 502, "server_error", "engine_failed"
    retry = True


class NoEngine(GatewayError):
    """Names what was waited for."""

    status, type, code = 503, "server_error", "engines_unavailable"
    retry = True
    retry_after_ms = 2000


class VersionGone(NoEngine):
    """Every engine has later weights, and none goes back."""

    code = "weight_version_gone"
    retry = False


class NotRecorded(GatewayError):
    """Log or store are away. A turn that was sampled meanwhile is not on the log, so it never happened: ask again."""

    status, type, code = 503, "server_error", "log_unavailable"
    retry = True
    retry_after_ms = 2000
