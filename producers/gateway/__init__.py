"""The gateway: sessions, OpenAI chat completions, token-in token-out, every turn on the log before its last byte.

What the gateway answers instead of a turn, in OpenAI's error shape.

GatewayError
├── BadRequest            400 the body or a field of it cannot be used
│   └── PrefillNotServed  the last message is the assistant's and cannot be left open
├── ImagesNotServed       400 the model, or its template, takes no images
├── ContextOverflow       400 the prompt leaves no room in the context window
├── Unauthorized          401 no, a forged or a foreign token
├── TooLarge              413 the body is longer than [gateway] max_body_bytes
├── UnknownSession        404 the log holds no such session
├── SessionEnded          409 the session is finished
├── KeyReused             409 an Idempotency-Key came back with another body
├── EpochLost             409 another gateway owns the session and cannot be reached
├── EngineFailed          502 the engine refused, or gave what cannot be recorded
├── NoEngine              503 no engine may serve this turn in time
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


class PrefillNotServed(BadRequest):
    """Says what keeps the assistant's last message from being continued."""

    code = "prefill_not_served"


class ImagesNotServed(GatewayError):
    """Says what the model lacks."""

    status, type, code = 400, "invalid_request_error", "images_not_served"


class ContextOverflow(GatewayError):
    """Names the prompt's length and the window."""

    status, type, code = 400, "invalid_request_error", "context_length_exceeded"


class Unauthorized(GatewayError):
    """Says which key belongs here, never which one came."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class TooLarge(GatewayError):
    """Names the limit and its setting."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class UnknownSession(GatewayError):
    """The session was never started, or its floor is wrong."""

    status, type, code = 404, "invalid_request_error", "session_not_found"


class SessionEnded(GatewayError):
    """Nothing can be added to a finished session."""

    status, type, code = 409, "invalid_request_error", "session_finished"


class KeyReused(GatewayError):
    """One key, one body."""

    status, type, code = 409, "invalid_request_error", "idempotency_key_reused"


class EpochLost(GatewayError):
    """Open the session again."""

    status, type, code = 409, "server_error", "epoch_lost"


class EngineFailed(GatewayError):
    """Names the engine and what it said."""

    status, type, code = 502, "server_error", "engine_failed"


class NoEngine(GatewayError):
    """Names what was waited for."""

    status, type, code = 503, "server_error", "engines_unavailable"


class NotRecorded(GatewayError):
    """Log or store are away. A turn that was sampled meanwhile is not on the log, so it never happened: ask again."""

    status, type, code = 503, "server_error", "log_unavailable"
