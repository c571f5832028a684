"""A run from your own process: batches for any trainer, weight versions, sessions and samples. docs/client.md describes
it by example.

    run = turnlog.client.connect("runs/mine")
    with run.trainer(cursor=saved) as trainer:
        for batch in trainer: ...

Importing this package imports neither torch nor a client of any server: what a call needs is imported by that call.
Blocking calls run on an event loop in a thread of their own.
"""

from __future__ import annotations

from turnlog.client.errors import (
    ClientError,
    CursorUnusable,
    NotExternal,
    OutOfTurn,
    SessionRefused,
    WeightsUnusable,
)
from turnlog.client.run import ClientRun, connect
from turnlog.trainer import Superseded

__all__ = [
    "ClientError",
    "ClientRun",
    "CursorUnusable",
    "NotExternal",
    "OutOfTurn",
    "SessionRefused",
    "Superseded",
    "WeightsUnusable",
    "connect",
]
