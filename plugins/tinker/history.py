"""The server's state as a fold of the log: sessions, models, saved weights, and the order in which commands are
executed. Pure: no clock, no I/O.

Commands of one model are executed in the order of their sequence numbers, without a gap, since a client may send
several at once. All ordered commands together have one order, which depends on the records of `tenant-commands` alone.
So a restart executes them in the same order, whatever was executed before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from turnlog.schemas import ids
from turnlog.schemas.events import TenantCommandCompleted, TenantCommandReceived, TenantStateSaved
from turnlog.schemas.types import int32s

OUTCOME_OK, OUTCOME_FAILED = "succeeded", "failed"
CHANGES_MODELS = frozenset({"create_model", "forward_backward", "optim_step", "load_weights", "finish_session"})
"""Ordered commands that change the models' state, and that a restart executes again behind the last snapshot."""
SAVES = {"save_weights": "weights", "save_weights_for_sampler": "sampler_weights"}
"""Command -> second part of the tinker:// path of what it saves."""
CREATES = frozenset({"create_model", "load_weights"})
"""Commands that create their model if it does not exist."""
_NOT_EXECUTED = frozenset({"create_session", "create_sampling_session", "delete_checkpoint"})
"""Commands that are done when they are read."""


@dataclass(slots=True)
class ClientSession:
    """A session of a client."""

    owner: str
    created_ms: int
    arguments: Mapping[str, Any]
    finished: bool = False
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class TenantModel:
    """A model: one adapter that is trained."""

    owner: str
    session_id: str
    arguments: Mapping[str, Any]
    """Arguments of the command that created it: rank, seed, trained parts, metadata."""
    created_ms: int
    last_ms: int
    expected: int = 1
    """Sequence number of the next command."""
    waiting: dict[int, str] = field(default_factory=dict)
    """Sequence number -> request of commands that arrived before their predecessors."""


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Weights that a command saved."""

    path: str
    """tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME."""
    request_id: str
    """Command that saved them."""
    number: int
    """Name of sampler weights at the engines: the beginning of a hash of the files, so that an engine that another
    server has used does not take others for them."""
    owner: str
    model_id: str
    kind: str
    """weights or sampler_weights."""
    at_ms: int
    size: int
    """Bytes of the files."""
    about: Mapping[str, Any]
    """Result of the command: rank, trained parts, expiry, metadata."""

    @property
    def checkpoint_id(self) -> str:
        """The path behind the model."""
        return self.path.partition("://")[2].partition("/")[2]


@dataclass(frozen=True, slots=True)
class SamplingSession:
    """The weights of a sampling session."""

    owner: str
    session_id: str
    path: str
    """tinker:// path of saved weights; empty for the base model."""


@dataclass(slots=True)
class CommandEntry:
    """A command and its result. Large payloads of a command with a result are on the log only."""

    event: TenantCommandReceived
    offset: int
    at_ms: int
    result: TenantCommandCompleted | None = None
    """The result without large payloads; `result_offset` says where the whole record is."""
    result_offset: int = -1

    @property
    def arguments(self) -> dict[str, Any]:
        """The command's arguments."""
        return decode_json(self.event.arguments)


def decode_json(content: bytes) -> dict[str, Any]:
    """Parse a JSON field of a record."""
    found: dict[str, Any] = json.loads(content)
    return found


def without_rows(event: TenantCommandReceived) -> TenantCommandReceived:
    """Return the command without its arrays."""
    return replace(event, tokens=b"", targets=b"", weights=b"", logprobs=b"", advantages=b"")


class History:
    """The fold. `apply` takes the commands in the order of the log, `complete` the results in theirs."""

    def __init__(self) -> None:
        self.sessions: dict[str, ClientSession] = {}
        self.models: dict[str, TenantModel] = {}
        self.saved: dict[str, SavedWeights] = {}
        """Path -> weights, without those that were deleted or replaced."""
        self.samplers: dict[str, SamplingSession] = {}
        self.commands: dict[str, CommandEntry] = {}
        self.order: list[str] = []
        """Ordered commands that may be executed, in the order of their execution."""
        self.samples: dict[str, None] = {}
        """Commands of kind sample without a result, in the order of the log."""
        self.snapshots: list[TenantStateSaved] = []
        self.end = 0
        """Offset behind the last command."""
        self._unfinished: dict[str, int] = {}
        """Commands to execute without a result -> offset, in the order of the log."""
        self.deletions: dict[str, str] = {}
        """Path -> request of its last delete_checkpoint."""

    def apply(self, event: TenantCommandReceived, offset: int, at_ms: int) -> None:
        """Apply a command. A request that was received before has no effect."""
        self.end = offset + 1
        if event.request_id in self.commands:
            return
        entry = self.commands[event.request_id] = CommandEntry(event, offset, at_ms)
        if event.command not in _NOT_EXECUTED:
            self._unfinished[event.request_id] = offset
        if event.command == "create_session":
            self.sessions[event.session_id] = ClientSession(event.owner, at_ms, entry.arguments)
        elif event.command == "create_sampling_session":
            self._add_sampler(entry.arguments["sampling_session_id"], event, entry.arguments.get("model_path") or "")
        elif event.command == "delete_checkpoint":
            self.deletions[entry.arguments["path"]] = event.request_id
            self.saved.pop(entry.arguments["path"], None)
        elif event.command == "sample":
            self.samples[event.request_id] = None
        else:
            self._put_in_order(event, entry)

    def _put_in_order(self, event: TenantCommandReceived, entry: CommandEntry) -> None:
        session = self.sessions.get(event.session_id)
        if event.command == "finish_session":
            if session is not None:
                session.finished = True
        elif event.command in CREATES and event.sequence < 0 and event.model_id not in self.models:
            self.models[event.model_id] = TenantModel(
                event.owner, event.session_id, entry.arguments, entry.at_ms, entry.at_ms
            )
            if session is not None:
                session.models.append(event.model_id)
        model = self.models.get(event.model_id)
        if model is not None:
            model.last_ms = entry.at_ms
        if model is None or event.sequence < model.expected:
            self.order.append(event.request_id)
            return
        model.waiting[event.sequence] = event.request_id
        while (request := model.waiting.pop(model.expected, None)) is not None:
            self.order.append(request)
            model.expected += 1

    def complete(self, event: TenantCommandCompleted, offset: int) -> None:
        """Apply a result. A second result of a command has no effect."""
        entry = self.commands.get(event.request_id)
        if entry is None or entry.result is not None:
            return
        entry.result = replace(event, tokens=b"", logprobs=b"", prompt_logprobs=b"")
        entry.result_offset = offset
        entry.event = without_rows(entry.event)
        self._unfinished.pop(event.request_id, None)
        self.samples.pop(event.request_id, None)
        if event.outcome == OUTCOME_OK and event.command in SAVES:
            self._add_saved(entry, event)

    def _add_saved(self, entry: CommandEntry, event: TenantCommandCompleted) -> None:
        about = decode_json(event.answer)
        command, path = entry.event, about["path"]
        deletion = self.commands.get(self.deletions.get(path, ""))
        if deletion is None or deletion.offset < entry.offset:
            size = sum(file.blob.size for file in event.files)
            number = int(ids.digest(*(part for file in event.files for part in (file.name, file.blob.sha256)))[:13], 16)
            self.saved[path] = SavedWeights(
                path, event.request_id, number, command.owner, command.model_id, SAVES[event.command],
                entry.at_ms, size, about,
            )  # fmt: skip
        if sampler := about.get("sampling_session_id"):
            self._add_sampler(sampler, command, path)

    def _add_sampler(self, sampler: str, event: TenantCommandReceived, path: str) -> None:
        self.samplers.setdefault(sampler, SamplingSession(event.owner, event.session_id, path))
        session = self.sessions.get(event.session_id)
        if session is not None and sampler not in session.samplers:
            session.samplers.append(sampler)

    def add_snapshot(self, event: TenantStateSaved) -> None:
        """Apply a snapshot."""
        self.snapshots.append(event)

    def files_of(self, saved: SavedWeights) -> TenantCommandCompleted:
        """Return the result that names the files of saved weights."""
        result = self.commands[saved.request_id].result
        assert result is not None, "weights are saved by a command with a result"
        return result

    def missing_call(self, event: TenantCommandReceived) -> int | None:
        """Return the sequence number of the earlier call of its model that a command waits for and that has not
        arrived; None if it waits for none."""
        model = self.models.get(event.model_id)
        return model.expected if model is not None and event.sequence in model.waiting else None

    def low_water(self, done: Iterable[str] = ()) -> int:
        """Return the offset of the first command that has no result, without those in `done`."""
        skipped = set(done)
        return next((offset for request, offset in self._unfinished.items() if request not in skipped), self.end)

    @property
    def unfinished(self) -> int:
        """Number of commands that have no result yet."""
        return len(self._unfinished)


def row_lengths(event: TenantCommandReceived | TenantCommandCompleted) -> list[int]:
    """Return the number of tokens of each row."""
    return [int(length) for length in int32s(event.row_lengths)]
