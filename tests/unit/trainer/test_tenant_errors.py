"""Calls of tenants that cannot be answered: what they raise, and that they change nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.datums import ADAM, synthetic_datums
from tests.unit.trainer.test_tenant_store import contents
from tests.unit.trainer.test_tenants import learner_of
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.launch import process_group
from turnlog.trainer.tenants import (
    DatumIncomplete,
    DatumMisshapen,
    DatumNotFinite,
    DatumTokenUnknown,
    InvalidArgument,
    RankTooLarge,
    TenantExists,
    TenantLearner,
    UnknownLoss,
    UnknownTenant,
)

LONG = np.zeros(TINY.positions + 1, "<i4")


@pytest.fixture(scope="module")
def learner() -> Iterator[TenantLearner]:
    """A learner with a tenant in training, and one that waits."""
    torch.set_num_threads(1)
    with process_group():
        learner = learner_of()
        learner.create("a", rank=4, seed=1, unembedding=True)
        learner.create("b", rank=8, seed=2)
        learner.forward_backward("a", synthetic_datums(0), "ppo", {}, backward=True)
        learner.optim_step("a", **ADAM)
        learner.forward_backward("a", synthetic_datums(1), "ppo", {}, backward=True)
        yield learner


@pytest.fixture
def unchanged(learner: TenantLearner, tmp_path: Path) -> Iterator[None]:
    """Compare all tenants before and after the test."""
    learner.snapshot(tmp_path / "before")
    yield
    learner.snapshot(tmp_path / "after")
    assert contents(tmp_path / "before") == contents(tmp_path / "after")


@pytest.mark.parametrize(
    ("changes", "loss_fn", "error", "field"),
    [
        ({"weights": None}, "cross_entropy", DatumIncomplete, "weights"),
        ({"logprobs": None}, "ppo", DatumIncomplete, "logprobs"),
        ({"advantages": None}, "dro", DatumIncomplete, "advantages"),
        ({"targets": None}, "ppo", DatumIncomplete, "targets"),
        ({"targets": np.zeros(2, "<i4")}, "ppo", DatumMisshapen, "targets"),
        ({"weights": np.zeros(2, "<f4")}, "ppo", DatumMisshapen, "weights"),
        ({"advantages": np.zeros((2, 2), "<f4")}, "ppo", DatumMisshapen, "advantages"),
        ({"logprobs": ["x"]}, "ppo", DatumMisshapen, "logprobs"),
        ({"logprobs": [[1.0], [1.0, 2.0]]}, "ppo", DatumMisshapen, "logprobs"),
        ({"tokens": np.zeros(3, "<f4")}, "ppo", DatumMisshapen, "tokens"),
        ({"tokens": np.zeros(0, "<i4")}, "ppo", DatumMisshapen, "targets"),
        ({"tokens": LONG, "targets": LONG, "weights": None, "logprobs": LONG, "advantages": LONG},
         "ppo", DatumMisshapen, "tokens"),
        ({"tokens": "at 2: 384"}, "ppo", DatumTokenUnknown, "tokens"),
        ({"targets": "at 2: -1"}, "ppo", DatumTokenUnknown, "targets"),
        ({"tokens": "at 2: 4294967296"}, "ppo", DatumTokenUnknown, "tokens"),
        ({"advantages": "at 2: nan"}, "ppo", DatumNotFinite, "advantages"),
        ({"logprobs": "at 2: -inf"}, "ppo", DatumNotFinite, "logprobs"),
        ({"weights": "at 2: 1e300"}, "cross_entropy", DatumNotFinite, "weights"),
        ({"logprobs": "at 2: 1e38"}, "dro", DatumNotFinite, "loss"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unchanged")
def test_a_datum_that_cannot_be_used_is_named(
    learner: TenantLearner, changes: dict[str, Any], loss_fn: str, error: type[Exception], field: str
) -> None:
    datums = synthetic_datums(3, count=4)
    for name, value in changes.items():
        found = value
        if isinstance(value, str):
            found = getattr(datums[2], name).astype("i8" if name in ("tokens", "targets") else "f8")
            found[2] = float(value.removeprefix("at 2: "))
        datums[2] = dataclasses.replace(datums[2], **{name: found})
    with pytest.raises(error, match=f"datum 2: {field}") as raised:
        learner.forward_backward("a", datums, loss_fn, {}, backward=True)
    assert (raised.value.datum, raised.value.field) == (2, field)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("unchanged")
def test_a_gradient_that_is_not_finite_is_not_added(learner: TenantLearner) -> None:
    datums = [dataclasses.replace(one, weights=np.full(len(one.tokens), 1e37, "<f4")) for one in synthetic_datums(3)]
    with pytest.raises(DatumNotFinite, match="gradient"):
        learner.forward_backward("a", datums, "cross_entropy", {}, backward=True)


@pytest.mark.usefixtures("unchanged")
def test_unknown_names_and_arguments(learner: TenantLearner) -> None:
    datums = synthetic_datums(3)
    with pytest.raises(UnknownTenant, match="'nobody'"):
        learner.forward_backward("nobody", datums, "ppo", {}, backward=True)
    with pytest.raises(UnknownTenant):
        learner.optim_step("nobody", **ADAM)
    with pytest.raises(UnknownTenant):
        learner.forget("nobody")
    with pytest.raises(UnknownLoss, match=r"'gspo'; there are cross_entropy, importance_sampling, ppo, cispo, dro"):
        learner.forward_backward("a", datums, "gspo", {}, backward=True)
    with pytest.raises(DatumMisshapen, match="datums has no datum"):
        learner.forward_backward("a", [], "ppo", {}, backward=True)
    with pytest.raises(TenantExists, match="'a'"):
        learner.create("a", rank=1, seed=1)
    with pytest.raises(RankTooLarge, match="rank 9 is above this learner's max_rank 8"):
        learner.create("c", rank=9, seed=1)
    with pytest.raises(InvalidArgument, match="at least 1"):
        learner.create("c", rank=0, seed=1)
    for rank, seed in (("2", 1), (2.0, 1), (True, 1), (2, None)):
        with pytest.raises(InvalidArgument, match="whole numbers"):
            learner.create("c", rank=rank, seed=seed)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="nothing to train"):
        learner.create("c", rank=1, seed=1, attention=False, mlp=False)


@pytest.mark.parametrize(
    ("loss_fn", "config", "reason"),
    [
        ("ppo", {"beta": 1.0}, "no argument beta; it has: clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 1.0}, "it has: none"),
        ("ppo", {"clip_low_threshold": math.nan}, "clip_low_threshold is nan"),
        ("cispo", {"clip_high_threshold": "2"}, "clip_high_threshold is '2'"),
        ("ppo", {"clip_low_threshold": 2.0}, "clip_low_threshold 2 is above clip_high_threshold 1.2"),
        ("dro", {"beta": -1.0}, "beta is -1.0"),
        ("dro", {"beta": True}, "beta is True"),
    ],
)
@pytest.mark.usefixtures("unchanged")
def test_arguments_of_a_loss(learner: TenantLearner, loss_fn: str, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        learner.forward_backward("a", synthetic_datums(3), loss_fn, config, backward=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "1"),
        ("learning_rate", True),
        ("learning_rate", -1.0),
        ("learning_rate", math.inf),
        ("beta1", 1.0),
        ("beta2", math.nan),
        ("eps", 0.0),
        ("eps", 1e-300),
        ("weight_decay", -0.1),
        ("grad_clip_norm", math.nan),
    ],
)
@pytest.mark.usefixtures("unchanged")
def test_arguments_of_a_step(learner: TenantLearner, name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is {value!r}"):
        learner.optim_step("a", **(ADAM | {name: value}))


@pytest.mark.usefixtures("unchanged")
def test_a_step_to_weights_that_are_not_finite_is_not_taken(learner: TenantLearner) -> None:
    with pytest.raises(DatumNotFinite, match="would not be finite"):
        learner.optim_step("a", **(ADAM | {"learning_rate": 9e19, "weight_decay": 9e19}))
