"""Errors of the client. Errors of servers (LogError, BlobError, ...) pass through it unchanged.

ClientError
├── NotExternal       [trainer] kind is not external: the run has a trainer of its own
├── CursorUnusable    the cursor is not one of this run
├── OutOfTurn         a call at a time at which it would break an order that the run relies on
├── WeightsUnusable   the folder cannot be published as a weight version
└── SessionRefused    a gateway refused a request of a session

turnlog.trainer.Superseded is raised for a trainer when another one has begun: this one must end.
"""

from __future__ import annotations


class ClientError(Exception):
    """Base of the tree above."""


class NotExternal(ClientError):
    """Remedy: the setting that the message names."""


class CursorUnusable(ClientError):
    """Remedy: the cursor of a checkpoint of this run, or None to train from the first batch."""


class OutOfTurn(ClientError):
    """Remedy: the call that the message names, first."""


class WeightsUnusable(ClientError):
    """The message names the folder and what is wrong with it."""


class SessionRefused(ClientError):
    """The message has the gateway's answer."""
