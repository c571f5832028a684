"""`turnlog role track`: each step that counts stands once in the files of TensorBoard and of wandb, whatever was
killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

from tests.unit.consumers.conftest import TrainedRun
from turnlog.plugins.exporters import BadOutlet, BusyOutlet, OtherHistory, one_writer
from turnlog.plugins.exporters.event_files import event_files
from turnlog.plugins.exporters.history import Point, StepHistory, Tracker
from turnlog.plugins.exporters.offline_runs import offline_runs, whole_records
from turnlog.plugins.exporters.tracking import outlets, track
from turnlog.schemas.events import StepCompleted
from turnlog.verbs.report import newest_incarnations

Curve = list[tuple[int, float]]
Opened = Callable[[Path, str], AbstractContextManager[Tracker]]


def step(batch: int, incarnation: int = 0) -> StepCompleted:
    return StepCompleted(
        event_id=f"{batch}-{incarnation}", run_id="run", batch_index=batch, draw_index=batch, incarnation=incarnation,
        step=batch + 1, loss=batch + incarnation / 8, grad_norm=1.0, learning_rate=1e-5, lag_max=1, tokens=10,
        trained_tokens=9, masked={"length_cut": 1}, skipped=False, reward_mean=0.5, logprob_gap_max=0.0,
        logprob_gap_mean=0.0, entropy=None, clip_fraction=0.0, seconds={"step": 2.0}, world_size=1,
        metrics={"kl": 0.25},
    )  # fmt: skip


STEPS = [
    *(step(batch) for batch in range(6)),
    *(step(batch, 1) for batch in range(3, 9)),  # killed in step 6, went on from the checkpoint behind step 3
    *(step(batch, 2) for batch in range(9, 11)),  # killed, and nothing was to be done again
    *(step(batch, 3) for batch in range(8, 12)),
]
COUNTS = [(each.step, each.loss) for each in newest_incarnations(STEPS)]


def in_tensorboard(folder: Path) -> Curve:
    """As TensorBoard itself reads it."""
    read = EventAccumulator(str(folder / "run"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in read.Scalars("train/loss")]


def in_wandb(folder: Path) -> Curve:
    """What `wandb sync` would upload of the run's newest life, folder by folder."""
    found: Curve = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for content in whole_records(path.read_bytes()):
            record = WandbRecord.FromString(content)
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if items:
                found.append((items["_step"], items["train/loss"]))
    return found


OUTLETS = {"tensorboard": (event_files, in_tensorboard), "wandb": (offline_runs, in_wandb)}


def written(opened: Opened, folder: Path, steps: list[StepCompleted]) -> None:
    history = StepHistory()
    with opened(folder, "run") as tracker:
        for offset, each in enumerate(steps):
            if history.take(Point(2 * offset, float(offset), each)):
                tracker.take(history)


@pytest.mark.parametrize("kind", OUTLETS)
async def test_every_step_that_counts_is_there_once_however_often_it_is_started(kind: str, tmp_path: Path) -> None:
    run, (_, read) = TrainedRun(), OUTLETS[kind]
    for more in (STEPS[:5], STEPS[5:8], [], STEPS[8:]):  # the second ends in the middle of what is done again
        await run.append(more)
        await track(run.role("track"), [(kind, tmp_path)], until_end=True)
    assert read(tmp_path) == COUNTS
    assert await track(run.role("track"), [(kind, tmp_path)], until_end=True) == len(COUNTS)
    assert read(tmp_path) == COUNTS


def test_the_history_is_what_the_report_counts() -> None:
    history = StepHistory()
    taken = [history.take(Point(offset, 0.0, each)) for offset, each in enumerate([*STEPS, step(3, 0)])]
    assert [(point.step.step, point.step.loss) for point in history.points] == COUNTS
    assert (taken[-1], history.life) == (False, 2)


def test_whatever_a_kill_left_of_an_event_file_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    written(event_files, tmp_path / "whole", STEPS)
    (whole,) = (tmp_path / "whole/run").glob("events.*")
    content = whole.read_bytes()
    for cut in range(0, len(content), 97):
        folder = tmp_path / str(cut)
        (folder / "run").mkdir(parents=True)
        (folder / "run" / whole.name).write_bytes(content[:cut])
        written(event_files, folder, STEPS)
        assert in_tensorboard(folder) == COUNTS, cut


@pytest.mark.parametrize("share", [0.0, 0.4, 0.97])
def test_whatever_a_kill_left_of_wandbs_file_goes_on_as_if_nothing_had_happened(share: float, tmp_path: Path) -> None:
    written(offline_runs, tmp_path, STEPS[:6])
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    written(offline_runs, tmp_path, STEPS[:6])
    assert in_wandb(tmp_path) == COUNTS[:3] + [(each.step, each.loss) for each in STEPS[3:6]]


CHILD = """
import sys
from pathlib import Path
from tests.unit.consumers.test_track import OUTLETS, STEPS
from turnlog.plugins.exporters.history import StepHistory, Point
history = StepHistory()
with OUTLETS[sys.argv[1]][0](Path(sys.argv[2]), "run") as tracker:
    for offset, each in enumerate(STEPS[: int(sys.argv[3])]):
        if history.take(Point(2 * offset, float(offset), each)):
            tracker.take(history)
    tracker.flush()
    print("written", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", OUTLETS)
def test_a_killed_tracker_leaves_no_step_out_and_repeats_none(kind: str, tmp_path: Path) -> None:
    opened, read = OUTLETS[kind]
    for steps in (4, 9):  # the second dies in the middle of what is done again
        killed([sys.executable, "-c", CHILD, kind, str(tmp_path), str(steps)])
    written(opened, tmp_path, STEPS)
    assert read(tmp_path) == COUNTS


def killed(command: list[str]) -> None:
    """Start it, and kill it as soon as it has said `written`."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)


def test_steps_that_are_taken_back_leave_the_run_that_wandb_syncs(tmp_path: Path) -> None:
    written(offline_runs, tmp_path, STEPS)
    assert {path.stem for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")} == {"run-run-2"}
    assert {path.stem for path in (tmp_path / "replaced").glob("*/*.wandb")} == {"run-run", "run-run-1"}


def test_everything_that_a_step_says_in_numbers_is_a_curve(tmp_path: Path) -> None:
    written(event_files, tmp_path, STEPS[:1])
    tags = EventAccumulator(str(tmp_path / "run")).Reload().Tags()
    assert {"train/loss", "train/skipped", "masked/length_cut", "seconds/step", "metrics/kl"} <= set(tags["scalars"])
    assert "train/entropy" not in tags["scalars"]
    assert tags["tensors"] == ["log/offset"]


@pytest.mark.parametrize("kind", OUTLETS)
def test_two_trackers_do_not_share_a_folder(kind: str, tmp_path: Path) -> None:
    opened, _ = OUTLETS[kind]
    with opened(tmp_path, "run"), pytest.raises(BusyOutlet, match="another process"), opened(tmp_path, "run"):
        pass


def test_a_lock_is_let_go_with_its_holder(tmp_path: Path) -> None:
    for _ in range(2):
        with one_writer(tmp_path / "a.lock"):
            pass


async def test_files_of_another_log_are_refused(tmp_path: Path) -> None:
    written(event_files, tmp_path, STEPS)
    run = TrainedRun()
    await run.append(STEPS[:2])
    with pytest.raises(OtherHistory, match="the files are of another log"):
        await track(run.role("track"), [("tensorboard", tmp_path)], until_end=True)


@pytest.mark.parametrize("said", ["comet=a", "tensorboard", "wandb=", "=a"])
def test_an_outlet_that_nobody_knows_is_refused(said: str) -> None:
    with pytest.raises(BadOutlet, match="KIND=DIR, where KIND is one of tensorboard, wandb"):
        outlets([said])
