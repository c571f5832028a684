"""The loader's side of direct transfers of weight versions from the training ranks to its engine (decision 50).

announced -> EngineWeightsAwaited -> WeightTransferBegun -> pause, receive, compare the digests, label, resume

The loader waits only for the newest version. It stops waiting when a transfer of this version begins without its
engine, when a later generation of the trainer publishes, or [loader] timeout_s after the last EngineWeightsAwaited.
Then it loads files (swap.py).

An engine that has received a part of a version, or a version with wrong digests, stays paused and has the label
loading-N. It is registered again without weights, so that no turn is sent to it until it has a whole version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from turnlog.consumers.loader.engine_status import EngineStatus
from turnlog.infra.engine_plugin.order import Transfer
from turnlog.infra.engines.protocol import CannotReceive, EngineControl, EngineDead, EngineRefused, TransferFailed
from turnlog.infra.roles.role import Role
from turnlog.infra.tensors.versions import DigestMismatch, Timer, check_names
from turnlog.schemas.events import EngineWeightsAwaited, WeightTransferBegun, WeightVersionPublished

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """The last report that the engine is ready: for which attempt, and when."""

    version: int
    attempt: int
    ranks: int
    """Number of ranks that join; 0 if the engine cannot receive weights from training ranks."""
    at: float
    """Monotonic time of the report."""


class DirectLoads:
    """Direct transfers to one engine."""

    def __init__(self, role: Role, control: EngineControl, status: EngineStatus) -> None:
        self._control, self._status = control, status
        self._patience_s = role.settings.loader.timeout_s
        self._transfer_s = min(self._patience_s, role.settings.weights.timeout_s)
        """Time-out in seconds of one transfer: the trainer ends it after [weights] timeout_s."""
        self._shared = role.settings.engine.colocate
        self._ready: ReadyReport | None = None
        self._begun: WeightTransferBegun | None = None
        """The last transfer on the log, whichever engines take part."""
        self._warned = False
        """Whether the reason why the engine cannot receive was logged as a warning since the engine started."""

    def note_begun(self, event: WeightTransferBegun) -> None:
        """Add a record of weight-transfers."""
        last = self._begun
        if last is None or (event.version, event.attempt) > (last.version, last.attempt):
            self._begun = event

    def begin_anew(self) -> None:
        """Forget the last report that the engine is ready, because the engine was registered and may be a new one."""
        self._ready, self._warned = None, False

    async def ask(self, event: WeightVersionPublished, *, cause: str = "") -> None:
        """Report that the engine is ready for the next attempt to send the version, or that it waits for the durable
        copy. This is reported once per version, and again with `cause`, which says why the last attempt failed. Raises
        EngineDead, Fenced.
        """
        if self._ready is not None and self._ready.version == event.version and not cause:
            return
        try:
            ranks = await self._control.direct_ranks()
        except CannotReceive as error:
            ranks, cause = 0, str(error)
            log.log(logging.DEBUG if self._warned else logging.WARNING, "%s: %s", self._status.url, error)
            self._warned = True
        begun = self._begun
        attempt = begun.attempt + 1 if begun is not None and begun.version == event.version else 0
        await self._status.say(
            EngineWeightsAwaited, awaited_version=event.version, attempt=attempt, ranks=ranks, cause=cause
        )
        self._ready = ReadyReport(event.version, attempt, ranks, time.monotonic())

    def is_expected(self, version: int) -> bool:
        """Return whether the training ranks may still send the version that the engine was reported to be ready for."""
        report = self._ready
        if report is None or report.version != version or not report.ranks or self._answer(version) is not None:
            return False
        return time.monotonic() - report.at < self._patience_s

    def has_begun(self, version: int) -> bool:
        """Return whether a transfer of the version to this engine has begun, and the engine has not received it yet."""
        answer = self._answer(version)
        return answer is not None and self._status.engine_id in answer.members

    def _answer(self, version: int) -> WeightTransferBegun | None:
        """Return the transfer that began after the engine was reported to be ready for the version, or None. Transfers
        of earlier attempts are over, or the engine received them while another loader, which was killed, led it."""
        report, begun = self._ready, self._begun
        if report is None or begun is None or not report.version == begun.version == version:
            return None
        return begun if begun.attempt >= report.attempt else None

    async def load(self, event: WeightVersionPublished) -> dict[str, float]:
        """Let the engine receive the version whose transfer `has_begun`, and resume it. Return the seconds of each
        phase.

        Raises EngineRefused (the engine still has its old weights), TransferFailed or BadWeights (the engine is left
        paused with the tensors that it received), EngineSwapFailed, Fenced.
        """
        report, begun = self._ready, self._answer(event.version)
        assert report is not None
        assert begun is not None
        self._ready = None
        timer = Timer({"join": time.monotonic() - report.at})
        transfer = Transfer(
            group=begun.group, address=begun.address, port=begun.port, world_size=begun.world_size,
            senders=begun.senders, version=begun.version, attempt=begun.attempt,
            first_rank=begun.members[self._status.engine_id], shared=self._shared,
        )  # fmt: skip
        async with self._status.lives(f"received version {event.version}"):
            await self._status.reached.check_owner()
            found = await self._receive(transfer, timer)
            try:
                await self._complete(event, found, timer)
            except EngineRefused as error:
                raise TransferFailed(f"{self._status.url} has version {event.version}, but: {error}") from error
        return timer.seconds

    async def _receive(self, transfer: Transfer, timer: Timer) -> dict[str, str]:
        """Pause the engine and return the digests of the tensors that it received."""
        control, released = self._control, self._status.released
        try:
            with timer.phase("pause"):
                await control.pause()
            with timer.phase("load"):
                found = await control.receive(transfer, timeout_s=self._transfer_s, released=released)
        except EngineRefused:
            if not (released or self._status.incomplete):
                await self._status.reached.check_owner()
                await control.resume()
            raise
        except TransferFailed:
            self._status.released = False
            raise
        self._status.released = False
        return found

    async def _complete(self, event: WeightVersionPublished, found: Mapping[str, str], timer: Timer) -> None:
        """Compare the digests, label the weights and resume. Raises BadWeights, EngineRefused, EngineDead, Fenced."""
        control, reached = self._control, self._status.reached
        with timer.phase("check"):
            check_digests(event, found)
            await reached.check_owner()
            await control.label(str(event.version))
            info = await control.model_info()
        if info.label != event.version:
            raise EngineDead(
                f"{self._status.url} reports {info.weight_version!r} after it was labelled {event.version}: another "
                "engine has taken its place"
            )
        with timer.phase("resume"):
            await reached.check_owner()
            await control.resume()

    async def report_incomplete(self) -> None:
        """Report the engine as one without weights if a transfer has left it with tensors of two versions. Raises
        Fenced, EngineSwapFailed."""
        status = self._status
        async with status.lives("was sent a part of a version"):
            info = status.drop_unrecorded(await self._control.model_info())
        if info.is_incomplete != status.incomplete or not status.has(info):
            await status.report_registered(info, waits=True)


def check_digests(event: WeightVersionPublished, found: Mapping[str, str]) -> None:
    """Check that an engine has loaded exactly the tensors that were announced. `found`: "HEX:SHAPE" by tensor name.
    Raises TensorsMismatch, DigestMismatch."""
    check_names(event, found, event.digests)
    differing = sorted(name for name, value in found.items() if value != event.digests[name])
    if differing:
        name = differing[0]
        raise DigestMismatch(
            f"version {event.version}: {len(differing)} tensors differ from those that were announced, the first is "
            f"{name}: {found[name]}, announced {event.digests[name]}"
        )
