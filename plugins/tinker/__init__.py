"""A server for clients of the Tinker API (docs/tinker.md): training with low-rank adapters, and sampling from them.

Every call is a command on the log, and its result is written once. The server's state is a fold of both, and a snapshot
of the models only shortens a restart.

TinkerError
├── BadCall          400: the call is malformed, or asks for something that this server does not offer
├── KeyRefused       401: the API key is missing or unknown
├── UnknownObject    404: no such session, model, checkpoint or request of this API key
├── SessionClosed    410: the session has ended
├── ServerEnds       503: the server ends, and the next one executes the call
├── StateDiverged    a command that is executed again gives another result than the one on the log
└── BadSetup         the settings do not fit: the message names them
"""

from __future__ import annotations

from http import HTTPStatus


class TinkerError(Exception):
    """Base class of all errors of the server; see the module docstring."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR


class BadCall(TinkerError):
    """The call cannot be executed, however often it is repeated. Remedy: what the message says."""

    status = HTTPStatus.BAD_REQUEST


class KeyRefused(TinkerError):
    """The API key is not one of [tinker] api_keys."""

    status = HTTPStatus.UNAUTHORIZED


class UnknownObject(TinkerError):
    """The server has no such object, or it belongs to another API key."""

    status = HTTPStatus.NOT_FOUND


class SessionClosed(TinkerError):
    """The client has closed its session."""

    status = HTTPStatus.GONE


class ServerEnds(TinkerError):
    """The server ends before it can answer. Remedy: send the call again, as the SDK does by itself."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class StateDiverged(TinkerError):
    """The models after a restart are not those before it. Remedy: the machine and the versions of before, or another
    run."""


class BadSetup(TinkerError):
    """The server cannot start with these settings."""
