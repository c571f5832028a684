"""Tenants on disk: saved adapters, snapshots, and what a kill leaves of them."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.datums import ADAM, synthetic_datums
from tests.small_disk import fill, mounted
from tests.unit.trainer.test_tenants import exported, learner_of, same, trained
from turnlog.trainer import CheckpointFailed
from turnlog.trainer.families.shape import TINY, TINY_MIXTURE
from turnlog.trainer.launch import process_group
from turnlog.trainer.tenants import AdapterSpec, SavedUnusable, TenantLearner, read_saved_spec

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def half_way(learner: TenantLearner) -> None:
    """Leave tenants of different ranks in different states, two of them with gradients."""
    learner.create("a", rank=8, seed=1, unembedding=True)
    learner.create("b", rank=3, seed=2, mlp=False)
    learner.create("c", rank=1, seed=3)
    for tenant in "ab":
        trained(learner, tenant, range(2))
    for tenant in "ac":
        learner.forward_backward(tenant, synthetic_datums(7), "cispo", {}, backward=True)


def go_on(learner: TenantLearner, folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return what the next steps give."""
    found, factors = [], {}
    for tenant in learner.tenants():
        found.append(learner.optim_step(tenant, **ADAM))
        for result in trained(learner, tenant, range(3, 5)):
            found.append(result.metrics)
        factors |= {f"{tenant} {name}": one for name, one in exported(learner, tenant, folder / tenant).items()}
    return found, factors


@pytest.mark.parametrize("max_rank", [8, 12])
def test_a_snapshot_goes_on_bit_for_bit_with_half_summed_gradients(tmp_path: Path, max_rank: int) -> None:
    learner = learner_of()
    half_way(learner)
    learner.snapshot(tmp_path / "snapshots", {"command": 17})
    other = learner_of(max_rank=max_rank)
    other.create("gone", rank=1, seed=1)
    assert other.restore(tmp_path / "snapshots") == {"command": 17}
    assert other.tenants() == learner.tenants()
    metrics, factors = go_on(learner, tmp_path / "ours")
    again, others = go_on(other, tmp_path / "theirs")
    if max_rank == 8:  # more zeros change the order of sums
        assert metrics == again
        assert all(torch.equal(factor, others[name]) for name, factor in factors.items())
    for name, factor in factors.items():
        torch.testing.assert_close(factor, others[name], atol=1e-2, rtol=0)


def test_the_newest_snapshot_counts_and_is_alone(tmp_path: Path) -> None:
    learner = learner_of()
    for number in range(3):
        learner.create(str(number), rank=1, seed=1)
        learner.snapshot(tmp_path, {"number": number})
    assert [one.name for one in tmp_path.iterdir()] == ["snapshot-000000000003"]
    learner.forget("0")
    assert learner.restore(tmp_path) == {"number": 2}
    assert list(learner.tenants()) == ["0", "1", "2"]


KILLED = """
import sys
from pathlib import Path
from typing import Any
from tests.unit.trainer.test_tenants import learner_of
from tests.fakes.datums import ADAM, synthetic_datums
from turnlog.trainer.launch import process_group
folder = Path(sys.argv[1])
with process_group():
    learner = learner_of()
    if folder.exists():
        step = learner.restore(folder)["step"]
    else:
        learner.create("a", rank=8, seed=1)
        learner.create("b", rank=4, seed=2)
        step = 0
    while True:
        step += 1
        for tenant in "ab":
            learner.forward_backward(tenant, synthetic_datums(step, count=1), "ppo", {}, backward=True)
            learner.optim_step(tenant, **ADAM)
        learner.snapshot(folder, {"step": step})
        print(step, flush=True)
"""


def test_a_process_that_is_killed_at_any_time_leaves_the_last_snapshot_or_the_one_before(tmp_path: Path) -> None:
    folder, moments, done = tmp_path / "snapshots", random.Random(1), 0
    for _ in range(4):
        command = [sys.executable, "-W", "ignore", "-c", KILLED, str(folder)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(3):
                done = int(child.stdout.readline())
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(moments.random() / 20)  # somewhere in the next step or snapshot
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read().split()
        done = int(rest[-1]) if rest else done
        restored = learner_of()
        step = restored.restore(folder)["step"]
        assert step in (done, done + 1)  # the kill may come between the snapshot and its line
        assert {restored.optim_step(tenant, **ADAM)["step"] for tenant in "ab"} == {step + 1}
    unbroken = learner_of()
    unbroken.create("a", rank=8, seed=1)
    for number in range(1, step + 1):
        unbroken.forward_backward("a", synthetic_datums(number, count=1), "ppo", {}, backward=True)
        unbroken.optim_step("a", **ADAM)
    restored.restore(folder)
    ours, theirs = (exported(one, "a", tmp_path / name) for one, name in ((restored, "ours"), (unbroken, "theirs")))
    assert all(torch.equal(factor, theirs[name]) for name, factor in ours.items())


def test_a_kill_between_two_names_loses_neither_folder(tmp_path: Path) -> None:
    learner = learner_of()
    learner.create("a", rank=2, seed=1)
    learner.save("a", tmp_path / "saved", optimizer=False)
    (tmp_path / "saved").rename(tmp_path / ".saved.replaced")  # as a kill between both renames leaves it
    (tmp_path / ".saved.part").mkdir()
    learner.load("a", tmp_path / "saved", optimizer=False)
    learner.save("a", tmp_path / "saved", optimizer=False)
    assert [one.name for one in tmp_path.iterdir()] == ["saved"]


def test_a_saved_adapter_goes_on_with_or_without_its_optimizer(tmp_path: Path) -> None:
    learner, other = learner_of(), learner_of(max_rank=12)
    for one in (learner, other):
        one.create("a", rank=3, seed=1, unembedding=True)
    trained(learner, "a", range(3))
    for optimizer in (True, False):
        learner.save("a", tmp_path / str(optimizer), optimizer=optimizer)
        assert read_saved_spec(tmp_path / str(optimizer)) == AdapterSpec(rank=3, seed=1, unembedding=True)
    trained(other, "a", range(1))
    other.forward_backward("a", synthetic_datums(1), "ppo", {}, backward=True)  # a load clears it
    other.load("a", tmp_path / "True", optimizer=True)
    learner.load("a", tmp_path / "True", optimizer=True)
    one, two = (each.optim_step("a", **ADAM) for each in (learner, other))
    assert one == two == {"grad_norm": 0.0, "step": 4.0}
    ours, theirs = (exported(each, "a", tmp_path / str(each.max_rank)) for each in (learner, other))
    assert all(torch.equal(factor, theirs[name]) for name, factor in ours.items())
    fresh = learner_of()
    fresh.create("a", rank=3, seed=9, unembedding=True)
    for each, optimizer in ((learner, False), (fresh, False)):
        each.load("a", tmp_path / "False", optimizer=optimizer)
    assert same(trained(learner, "a", range(2)), trained(fresh, "a", range(2)))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("missing", "cannot be read"),
        ("cut", "cannot be read"),
        ("empty json", "cannot be read"),
        ("not json", "cannot be read"),
        ("list", "no JSON object"),
        ("no adapter", "does not say what its adapter trains"),
        ("no steps", "is damaged: TypeError"),
        ("other format", "has format 99"),
        ("other model", "another model"),
        ("other tenant", "the tenant's is of"),
        ("other shapes", "the adapter has"),
        ("without a factor", "cannot be read"),
        ("without optimizer", "saved without the optimizer"),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(damage: str, reason: str, tmp_path: Path) -> None:
    learner = learner_of()
    learner.create("a", rank=2, seed=1)
    learner.save("a", tmp_path / "saved", optimizer=damage != "without optimizer")
    spoil(tmp_path / "saved", damage)
    learner.forward_backward("a", synthetic_datums(1), "ppo", {}, backward=True)
    learner.snapshot(tmp_path / "before")
    with pytest.raises(SavedUnusable, match=reason):
        learner.load("a", tmp_path / "saved", optimizer=True)
    learner.snapshot(tmp_path / "after")
    assert contents(tmp_path / "before") == contents(tmp_path / "after")


TEXTS = {"empty json": "", "not json": "{", "list": "[]"}
CHANGES = {"no adapter": {"adapter": {"rank": 1}}, "other format": {"format": 99}, "no steps": {"steps": None}}
OTHERS: dict[str, dict[str, Any]] = {
    "other model": {"rank": 2},
    "other tenant": {"rank": 3},
    "other shapes": {"rank": 3},
    "without a factor": {"rank": 2, "mlp": False},
}


def spoil(saved: Path, damage: str) -> None:
    """Damage a saved adapter of rank 2."""
    numbers, about = saved / "rank-0.safetensors", saved / "tenant.json"
    text = about.read_text()
    if damage == "missing":
        numbers.unlink()
    elif damage == "cut":
        numbers.write_bytes(numbers.read_bytes()[:-9])
    elif damage in TEXTS:
        about.write_text(TEXTS[damage])
    elif damage in CHANGES:
        about.write_text(json.dumps(json.loads(text) | CHANGES[damage]))
    elif damage in OTHERS:
        other = learner_of(TINY_MIXTURE if damage == "other model" else TINY)
        other.create("a", seed=1, **OTHERS[damage])
        other.save("a", saved, optimizer=True)
        if damage in ("other shapes", "without a factor"):
            about.write_text(text)


def test_a_snapshot_that_cannot_be_restored_changes_nothing(tmp_path: Path) -> None:
    learner = learner_of()
    learner.create("a", rank=8, seed=1)
    with pytest.raises(SavedUnusable, match="no snapshot"):
        learner.restore(tmp_path / "nowhere")
    learner.snapshot(tmp_path / "snapshots")
    with pytest.raises(TypeError, match="not JSON serializable"):
        learner.snapshot(tmp_path / "snapshots", {"path": tmp_path})
    with pytest.raises(SavedUnusable, match="above this learner's max_rank 4"):
        learner_of(max_rank=4).restore(tmp_path / "snapshots")
    for file in (tmp_path / "snapshots").rglob("*.safetensors"):
        file.write_bytes(b"")
    before = learner.tenants()
    with pytest.raises(SavedUnusable, match=re.escape("snapshot-000000000001")):
        learner.restore(tmp_path / "snapshots")
    assert learner.tenants() == before


def test_a_full_disk_leaves_the_snapshot_before(tmp_path: Path) -> None:
    learner = learner_of()
    learner.create("a", rank=2, seed=1)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointFailed, match="Not a directory"):
        learner.snapshot(tmp_path / "file" / "snapshots")
    (tmp_path / "disk").mkdir()
    with mounted(tmp_path / "disk") as disk:
        learner.snapshot(disk / "snapshots", {"number": 1})
        learner.create("b", rank=8, seed=1)
        filler = fill(disk, but=1 << 16)
        with pytest.raises(CheckpointFailed, match="No space left"):
            learner.snapshot(disk / "snapshots", {"number": 2})
        assert learner_of().restore(disk / "snapshots") == {"number": 1}
        filler.unlink()
        learner.snapshot(disk / "snapshots", {"number": 2})
        assert [one.name for one in (disk / "snapshots").iterdir()] == ["snapshot-000000000002"]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files by path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
