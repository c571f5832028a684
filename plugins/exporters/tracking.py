"""`turnlog role track`: write the training curve of a run, from train-steps, into TensorBoard's or Weights & Biases'
own files."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from prometheus_client import Counter

from turnlog.infra.history import assign_from_start, caught_up
from turnlog.infra.log import Partition
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role
from turnlog.plugins.exporters import BadOutlet, OtherHistory
from turnlog.plugins.exporters.event_files import event_files
from turnlog.plugins.exporters.history import Point, StepHistory, Tracker
from turnlog.plugins.exporters.offline_runs import offline_runs
from turnlog.schemas.events import StepCompleted
from turnlog.schemas.topics import STEPS

TAKE_S = STAGE_S.labels("track", "take")
TRACKED = Counter("turnlog_tracked_steps", "Steps of the effective history, including those that were already there")
PLACE = Partition(STEPS.name, 0)
KINDS: dict[str, Callable[[Path, str], AbstractContextManager[Tracker]]] = {
    "tensorboard": event_files, "wandb": offline_runs,
}  # fmt: skip


def outlets(wanted: Sequence[str]) -> list[tuple[str, Path]]:
    """Parse each KIND=DIR into (kind, folder). Raises BadOutlet."""
    found = [(kind, Path(folder)) for kind, _, folder in (each.partition("=") for each in wanted)]
    for (kind, folder), said in zip(found, wanted, strict=True):
        if kind not in KINDS or said == f"{kind}=" or folder == Path():
            raise BadOutlet(f"--to {said}: KIND=DIR, where KIND is one of {', '.join(KINDS)}")
    return found


async def track(role: Role, wanted: Sequence[tuple[str, Path]], *, until_end: bool) -> int:
    """Write every effective step until the role stops, or up to the present end. Return their number. The topic is read
    from its beginning each time, because it is small and complete; steps that the files already contain are skipped.

    Raises OutletError, OSError, LogError, RegistryUnavailable. What was written until then stays and is found by the
    next call.
    """
    with contextlib.ExitStack() as stack:
        trackers = [stack.enter_context(KINDS[kind](folder, role.settings.run.id)) for kind, folder in wanted]
        async with role.log.reader(patient=True) as reader:
            ends = await assign_from_start(role.log, reader, [PLACE])
            for (kind, folder), tracker in zip(wanted, trackers, strict=True):
                if tracker.there >= ends[PLACE]:
                    raise OtherHistory(
                        f"{kind}={folder} holds the step at offset {tracker.there} of {STEPS.name}, which ends at "
                        f"{ends[PLACE]}: the files are of another log"
                    )
            role.health.mark_started()
            history = StepHistory()
            while not role.stopping.is_set() and not (until_end and caught_up(reader, ends)):
                role.health.beat()
                async for record, event in role.run_events(await reader.poll(timeout_s=0.5)):
                    if isinstance(event, StepCompleted):
                        point = Point(record.offset, record.timestamp_ms / 1000, event)
                        with TAKE_S.time():
                            await asyncio.to_thread(_take, point, history, trackers)
                for tracker in trackers:
                    tracker.flush()
    return len(history.points)


def _take(point: Point, history: StepHistory, trackers: Sequence[Tracker]) -> None:
    if history.take(point):
        TRACKED.inc()
        for tracker in trackers:
            tracker.take(history)
