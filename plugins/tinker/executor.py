"""Executes the ordered commands on the models, one after the other.

A restart restores the newest snapshot, executes the commands behind it that have results again, compares each result
with the one on the log, and goes on with those that have none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from prometheus_client import Counter, Gauge

from turnlog.infra.blobs import BlobCorrupt, BlobMissing, Blobs
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role
from turnlog.plugins.tinker import StateDiverged
from turnlog.plugins.tinker.history import (
    CHANGES_MODELS,
    OUTCOME_FAILED,
    OUTCOME_OK,
    SAVES,
    History,
    SavedWeights,
    decode_json,
    row_lengths,
)
from turnlog.plugins.tinker.results import ServerLog
from turnlog.plugins.tinker.snapshots import SnapshotStore, files_below
from turnlog.schemas import ids
from turnlog.schemas.canonical import canonical_text
from turnlog.schemas.events import TenantCommandCompleted, TenantCommandReceived, TenantStateSaved, WeightFile
from turnlog.schemas.types import float32s, int32s, pack_float32s
from turnlog.settings import Settings
from turnlog.trainer.tenants import Datum, TenantError, TenantLearner

log = logging.getLogger(__name__)
T = TypeVar("T")
COMMANDS_DONE = Counter("turnlog_tinker_commands", "Commands with a result", ["kind", "outcome"])
COMMANDS_OPEN = Gauge("turnlog_tinker_commands_open", "Commands that have no result yet")
EXECUTE_S, SNAPSHOT_S = (STAGE_S.labels("tinker", stage) for stage in ("execute", "snapshot"))
COMPARED = ("outcome", "answer", "metrics", "row_lengths", "logprobs")
"""Fields of a result that a second execution must give again."""


class CommandFailed(Exception):
    """The command cannot be executed; nothing was changed. The message is the client's."""


def completed_result(event: TenantCommandReceived, outcome: str = OUTCOME_OK, **fields: Any) -> TenantCommandCompleted:
    """Return the result of a command."""
    return TenantCommandCompleted(
        event_id=ids.digest("TenantCommandCompleted", event.request_id),
        run_id=event.run_id,
        request_id=event.request_id,
        command=event.command,
        outcome=outcome,
        **fields,
    )


def failed_result(event: TenantCommandReceived, error: object, category: str = "user") -> TenantCommandCompleted:
    """Return the result of a command that failed: by a mistake of the `user`, or of the `server`."""
    return completed_result(event, OUTCOME_FAILED, error=str(error), category=category)


def json_bytes(value: Mapping[str, object]) -> bytes:
    """Return canonical JSON."""
    return canonical_text(value, ascii_only=False, nan=False).encode()


def datums_of(event: TenantCommandReceived) -> list[Datum]:
    """Return the rows of a command, whose payloads are inline."""
    ends = np.cumsum(row_lengths(event))[:-1]

    def split(packed: object, kind: Callable[[bytes], Any]) -> list[Any]:
        assert isinstance(packed, bytes), "the payload is inline"
        return np.split(kind(packed), ends) if packed else [None] * (len(ends) + 1)

    columns = {
        **{name: split(getattr(event, name), int32s) for name in ("tokens", "targets")},
        **{name: split(getattr(event, name), float32s) for name in ("weights", "logprobs", "advantages")},
    }
    return [Datum(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


class Executor:
    """The models, and the commands that change them."""

    def __init__(
        self, role: Role, server: ServerLog, learner: TenantLearner, snapshots: SnapshotStore,
        thread: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        """`thread`: the one thread that calls the learner."""
        self._role, self._server, self._learner, self._snapshots = role, server, learner, snapshots
        self._thread = thread
        self._executed = 0
        self._changed = 0
        """Commands that changed models since the last snapshot."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, role: Role, server: ServerLog, snapshots: SnapshotStore,
        open_learner: Callable[[Settings], AbstractContextManager[TenantLearner]],
    ) -> AsyncIterator[Executor]:  # fmt: skip
        """Open the learner in a thread of its own, which ends with the block. Raises what `open_learner` raises."""
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, thread_name_prefix="tenants")
        learner = open_learner(role.settings)
        try:
            opened = await loop.run_in_executor(thread, learner.__enter__)
            try:
                yield cls(role, server, opened, snapshots, thread)
            finally:
                await loop.run_in_executor(thread, learner.__exit__, None, None, None)
        finally:
            thread.shutdown()

    @property
    def _history(self) -> History:
        return self._server.history

    async def _compute(self, call: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Run a method of the learner in the one thread that calls it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: call(*arguments, **keywords))

    async def restore(self) -> None:
        """Bring the models to the state behind the last result on the log. Raises StateDiverged, StoreUnavailable,
        LogUnavailable."""
        async with self._snapshots.newest(self._history.snapshots) as (executed, folder):
            if folder is not None:
                await self._compute(self._learner.restore, folder)
        self._executed = executed
        for request in self._history.order[executed:]:
            entry = self._history.commands[request]
            if entry.result is None:
                break
            self._role.health.beat()
            if entry.result.outcome == OUTCOME_OK and entry.event.command in CHANGES_MODELS:
                await self._execute_again(request)
                self._changed += 1
            self._executed += 1
        log.info("restored %d commands, %d of them from a snapshot", self._executed, executed)

    async def _execute_again(self, request: str) -> None:
        event, recorded = await self._server.command_of(request), await self._server.result_of(request)
        again = await self._result(event, recorded)
        for name in COMPARED:
            if getattr(again, name) != getattr(recorded, name):
                raise StateDiverged(
                    f"{event.command} {request} of {event.model_id or event.session_id} was executed again after a "
                    f"restart, and its {name} differ from those on the log: the models are not those of before; start "
                    "the server on the machine and with the versions of before, or begin another run ([run] id)"
                )

    async def run(self) -> None:
        """Execute commands until cancelled. Raises LogError, StoreUnavailable, and what a fault of the learner
        raises."""
        while True:
            await self._server.wait_until(lambda: len(self._history.order) > self._executed)
            request = self._history.order[self._executed]
            event = self._history.commands[request].event
            fault: Exception | None = None
            try:
                with EXECUTE_S.time():
                    result = await self._result(await self._server.command_of(request))
            except (BlobMissing, BlobCorrupt) as error:  # the rows of the command; waiting does not bring them back
                result = failed_result(event, error, "server")
            except Exception as error:  # it is recorded, so that the command is not executed again, and ends the role
                if not isinstance(error, RuntimeError | ValueError | MemoryError | FloatingPointError):
                    raise
                fault = error
                result = failed_result(event, f"the server failed: {type(error).__name__}: {error}", "server")
            await self._server.record(result)
            if fault is not None:
                raise fault
            self._executed += 1
            COMMANDS_DONE.labels(event.command, result.outcome).inc()
            COMMANDS_OPEN.set(self._history.unfinished)
            self._changed += result.outcome == OUTCOME_OK and event.command in CHANGES_MODELS
            if self._changed >= self._role.settings.tinker.snapshot_every:
                with SNAPSHOT_S.time():
                    await self.take_snapshot()

    async def take_snapshot(self) -> None:
        """Store the state of all models, and record it. Raises StoreUnavailable, LogError."""
        executed = self._executed
        with self._snapshots.scratch.folder() as scratch:
            folder = scratch / "snapshot"
            await self._compute(self._learner.snapshot, folder)
            prefix, files = await self._snapshots.store(folder, executed)
        run_id = self._role.settings.run.id
        event_id = ids.digest("TenantStateSaved", run_id, executed, prefix)
        event = TenantStateSaved(event_id=event_id, run_id=run_id, executed=executed, folder=prefix, files=files)
        await self._server.record(event)
        self._changed = 0
        await self._snapshots.prune(self._history.snapshots)

    async def _result(
        self, event: TenantCommandReceived, recorded: TenantCommandCompleted | None = None
    ) -> TenantCommandCompleted:
        """Execute a command. `recorded`: its result of before, if it is executed again."""
        if event.refusal:
            return failed_result(event, event.refusal)
        execute = self._commands()[event.command]
        try:
            return await execute(event, recorded)
        except (CommandFailed, TenantError) as error:
            return failed_result(event, error)
        except (BlobMissing, BlobCorrupt) as error:  # waiting does not bring the files back
            return failed_result(event, error, "server")

    def _commands(
        self,
    ) -> dict[str, Callable[[TenantCommandReceived, TenantCommandCompleted | None], Awaitable[TenantCommandCompleted]]]:
        train = self._forward_backward
        return {
            "create_model": self._create,
            "forward": train,
            "forward_backward": train,
            "optim_step": self._optim_step,
            **dict.fromkeys(SAVES, self._save),
            "load_weights": self._load,
            "finish_session": self._finish,
        }

    def _check_room(self, recorded: object) -> None:
        """Raise CommandFailed if there is no room for another model; what is executed again had it."""
        most = self._role.settings.tinker.max_models
        if recorded is None and len(self._learner.tenants()) >= most:
            raise CommandFailed(f"the server has {most} models ([tinker] max_models): close a session, or raise it")

    async def _create(
        self, event: TenantCommandReceived, recorded: TenantCommandCompleted | None
    ) -> TenantCommandCompleted:
        about = decode_json(event.arguments)
        self._check_room(recorded)
        await self._compute(
            self._learner.create, event.model_id, rank=about["rank"], seed=about["seed"],
            attention=about["train_attn"], mlp=about["train_mlp"], unembedding=about["train_unembed"],
        )  # fmt: skip
        return completed_result(event, answer=json_bytes({"model_id": event.model_id}))

    async def _forward_backward(self, event: TenantCommandReceived, _: object) -> TenantCommandCompleted:
        about = decode_json(event.arguments)
        found = await self._compute(
            self._learner.forward_backward, event.model_id, datums_of(event), about["loss_fn"], about["config"],
            backward=event.command == "forward_backward",
        )  # fmt: skip
        logprobs = pack_float32s(np.concatenate(found.logprobs))
        metrics = {name: float(value) for name, value in found.metrics.items()}
        return completed_result(event, row_lengths=event.row_lengths, logprobs=logprobs, metrics=metrics)

    async def _optim_step(self, event: TenantCommandReceived, _: object) -> TenantCommandCompleted:
        about = decode_json(event.arguments)
        metrics = await self._compute(self._learner.optim_step, event.model_id, **about)
        return completed_result(event, metrics={name: float(value) for name, value in metrics.items()})

    async def _save(self, event: TenantCommandReceived, _: object) -> TenantCommandCompleted:
        about = decode_json(event.arguments)
        kind, name = SAVES[event.command], about["name"]
        path = f"tinker://{event.model_id}/{kind}/{name}"
        if path in self._history.saved and not about["overwrite"]:
            raise CommandFailed(f"{path} exists: choose another name, or set overwrite")
        model = self._history.models.get(event.model_id)
        with self._snapshots.scratch.folder() as scratch:
            folder = scratch / "saved"
            if kind == "weights":
                await self._compute(self._learner.save, event.model_id, folder, optimizer=True)
            else:
                await self._compute(self._learner.export_adapter, event.model_id, folder)
            files = await store_files(self._role.blobs, folder)
        assert model is not None, "the learner has the model, so the log has its creation"
        parts = {key: model.arguments[key] for key in ("rank", "train_attn", "train_mlp", "train_unembed")}
        answer = {"path": path, **parts, **{key: about[key] for key in ("ttl_seconds", "user_metadata")}}
        if about.get("sampling_session_id"):
            answer["sampling_session_id"] = about["sampling_session_id"]
        return completed_result(event, answer=json_bytes(answer), files=files)

    async def _load(
        self, event: TenantCommandReceived, recorded: TenantCommandCompleted | None
    ) -> TenantCommandCompleted:
        """Load weights. A second execution loads the same ones, even if another save has their path by now."""
        about = decode_json(event.arguments)
        if recorded is not None:
            source = decode_json(recorded.answer)["source"]
        else:
            source = self._loadable(event, about["path"]).request_id
        saved = decode_json((await self._server.result_of(source)).answer)
        with self._snapshots.scratch.folder() as scratch:
            folder = scratch / "saved"
            await fetch_files(self._role.blobs, (await self._server.result_of(source)).files, folder)
            created = event.sequence < 0 and "seed" in about
            if created:
                self._check_room(recorded)
                await self._compute(
                    self._learner.create, event.model_id, rank=saved["rank"], seed=about["seed"],
                    attention=saved["train_attn"], mlp=saved["train_mlp"], unembedding=saved["train_unembed"],
                )  # fmt: skip
            try:
                await self._compute(self._learner.load, event.model_id, folder, optimizer=about["optimizer"])
            except TenantError:
                if created:
                    await self._compute(self._learner.forget, event.model_id)
                raise
        answer = {"path": about["path"], "model_id": event.model_id, "source": source}
        return completed_result(event, answer=json_bytes(answer))

    def _loadable(self, event: TenantCommandReceived, path: str) -> SavedWeights:
        saved = self._history.saved.get(path)
        if saved is None or saved.owner != event.owner:
            raise CommandFailed(f"{path} does not exist")
        if saved.kind != "weights":
            raise CommandFailed(f"{path} was saved for sampling: save_state writes weights that can be trained further")
        return saved

    async def _finish(self, event: TenantCommandReceived, _: object) -> TenantCommandCompleted:
        session = self._history.sessions.get(event.session_id)
        for model in session.models if session is not None else ():
            await self._forget(model)
        return completed_result(event)

    async def _forget(self, model: str) -> None:
        try:
            await self._compute(self._learner.forget, model)
        except TenantError as missing:  # its creation failed
            log.info("model %s is not there to be forgotten: %s", model, missing)


async def store_files(blobs: Blobs, folder: Path) -> tuple[WeightFile, ...]:
    """Store the files of a folder as blobs. Raises StoreUnavailable."""
    return tuple(
        [WeightFile(path.relative_to(folder).as_posix(), await blobs.put_file(path)) for path in files_below(folder)]
    )


async def fetch_files(blobs: Blobs, files: tuple[WeightFile, ...], folder: Path) -> None:
    """Fetch files into a new folder, verified. Raises BlobMissing, BlobCorrupt, StoreUnavailable."""
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        await blobs.get_file(file.blob, path)
