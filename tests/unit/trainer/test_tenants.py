"""Adapters of tenants against PEFT and torch, and against each other bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.datums import ADAM, synthetic_datums
from tests.reference.peft_tenant import PeftTenant
from turnlog.infra.tensors import adapters
from turnlog.trainer.calls import RankZero
from turnlog.trainer.families.shape import TINY, TINY_MIXTURE, ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.models.lora import first_factor
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.tenants import LOSSES, ForwardBackwardResult, TenantLearner
from turnlog.trainer.warm_start import random_weights

ONE = LearnerOptions(threads=1)
TIED = dataclasses.replace(TINY, tied=True)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def learner_of(shape: ModelShape = TINY, *, max_rank: int = 8, options: LearnerOptions = ONE) -> TenantLearner:
    return TenantLearner(shape, random_weights(shape, 1), options, max_rank=max_rank)


def exported(learner: TenantLearner, tenant: str, folder: Path) -> dict[str, torch.Tensor]:
    learner.export_adapter(tenant, folder)
    return load_file(folder / f"{adapters.STEM}.safetensors")


def trained(learner: TenantLearner, tenant: str, seeds: range, loss_fn: str = "ppo") -> list[ForwardBackwardResult]:
    """Take two passes and a step for each seed."""
    found = []
    for seed in seeds:
        for part in range(2):
            datums = synthetic_datums(2 * seed + part)
            found.append(learner.forward_backward(tenant, datums, loss_fn, {}, backward=True))
        learner.optim_step(tenant, **ADAM)
    return found


def same(ours: list[ForwardBackwardResult], theirs: list[ForwardBackwardResult]) -> bool:
    return all(
        one.metrics == other.metrics
        and all(np.array_equal(left, right) for left, right in zip(one.logprobs, other.logprobs, strict=True))
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("targets", ["shifted", "any"])
def test_losses_logprobs_and_steps_are_those_of_peft_and_adamw(loss_fn: str, targets: str, tmp_path: Path) -> None:
    learner = learner_of(options=dataclasses.replace(ONE, microbatch_tokens=128))
    learner.create("tenant", rank=3, seed=5, unembedding=True)
    learner.export_adapter("tenant", tmp_path / "start")
    reference = PeftTenant(TINY, random_weights(TINY, 1), tmp_path / "start")
    arguments = dict(LOSSES[loss_fn].arguments)
    for step in range(4):
        for part in range(2):
            datums = synthetic_datums(2 * step + part, shifted=targets == "shifted", weights=loss_fn == "cross_entropy")
            ours = learner.forward_backward("tenant", datums, loss_fn, {}, backward=True)
            loss, logprobs = reference.forward_backward(datums, loss_fn, arguments)
            positions = sum(len(datum.tokens) for datum in datums)
            assert ours.metrics["loss:sum"] / positions == pytest.approx(loss / positions, abs=1e-5)
            for one, other in zip(ours.logprobs, logprobs, strict=True):
                np.testing.assert_allclose(one, other.numpy(), atol=1e-5)
        clip = 0.0 if step % 2 else 0.5
        # With an eps of 1e-12 the rounding of one gradient near 0 decides the sign of a whole step.
        adam = ADAM | {"eps": 1e-3, "weight_decay": 0.1, "grad_clip_norm": clip}
        norm = reference.optim_step(1e-3, (0.9, 0.95), 1e-3, 0.1, clip)
        assert learner.optim_step("tenant", **adam)["grad_norm"] == pytest.approx(norm, rel=1e-4)
    wanted = reference.factors()
    found = exported(learner, "tenant", tmp_path / "end")
    assert found.keys() == wanted.keys()
    for name, factor in found.items():
        torch.testing.assert_close(factor, wanted[name], atol=1e-5, rtol=1e-5, msg=name)


def test_other_thresholds_weights_and_prefixes_that_rows_share(tmp_path: Path) -> None:
    learner = learner_of()
    learner.create("tenant", rank=8, seed=1)
    learner.export_adapter("tenant", tmp_path / "start")
    reference = PeftTenant(TINY, random_weights(TINY, 1), tmp_path / "start")
    datums = synthetic_datums(1, count=8, prefix=100)
    for loss_fn, config in (
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}),
        ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}),
        ("dro", {"beta": 0.5}),
    ):
        loss, _ = reference.forward_backward(datums, loss_fn, config)
        ours = learner.forward_backward("tenant", datums, loss_fn, config, backward=True)
        assert ours.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
        assert (ours.metrics["clipped_tokens:sum"] > 0) == (loss_fn != "dro")
    norm = reference.optim_step(1e-3, (0.9, 0.95), 1e-12, 0.0, 0.0)
    assert learner.optim_step("tenant", **ADAM)["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("shape", [TINY, TIED, TINY_MIXTURE], ids=["dense", "tied", "mixture"])
@pytest.mark.parametrize("parts", ["attention", "mlp", "unembedding"])
def test_a_tenant_trains_the_parts_that_it_names_and_peft_loads_them(
    shape: ModelShape, parts: str, tmp_path: Path
) -> None:
    learner = learner_of(shape)
    if shape.mixture and parts == "mlp":
        parts = "unembedding"
    flags = {name: name == parts for name in ("attention", "mlp", "unembedding")}
    learner.create("tenant", rank=2, seed=5, **flags)
    trained(learner, "tenant", range(3), "cross_entropy")
    found = exported(learner, "tenant", tmp_path / "adapter")
    kinds = {name.split(".")[-3].removesuffix("_proj") for name in found}
    assert kinds == {"attention": set("qkvo"), "mlp": {"gate", "up", "down"}, "unembedding": {"lm_head"}}[parts]
    assert all(bool(factor.any()) for factor in found.values())
    datums = synthetic_datums(9, shifted=False)
    ours = learner.forward_backward("tenant", datums, "cross_entropy", {}, backward=False)
    weights = random_weights(shape, 1)
    if shape.tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    reference = PeftTenant(shape, weights, tmp_path / "adapter")
    with torch.no_grad():
        for one, datum in zip(ours.logprobs, datums, strict=True):
            np.testing.assert_allclose(one, reference.logprobs(datum).numpy(), atol=1e-5)


def test_tenants_in_turns_get_bit_for_bit_what_each_gets_alone(tmp_path: Path) -> None:
    both, first, second = learner_of(), learner_of(), learner_of()
    for learner, names in ((both, "ab"), (first, "a"), (second, "b")):
        for name in names:
            learner.create(name, rank={"a": 8, "b": 3}[name], seed=ord(name), unembedding=name == "a")
    mixed: dict[str, list[ForwardBackwardResult]] = {"a": [], "b": []}
    for seed in range(3):
        for part in range(2):
            for name in "ab":
                datums = synthetic_datums(2 * seed + part)
                mixed[name].append(both.forward_backward(name, datums, "ppo", {}, backward=True))
        for name in "ba":
            both.optim_step(name, **ADAM)
    assert same(mixed["a"], trained(first, "a", range(3)))
    assert same(mixed["b"], trained(second, "b", range(3)))
    for name, alone in (("a", first), ("b", second)):
        ours = exported(both, name, tmp_path / name)
        theirs = exported(alone, name, tmp_path / f"{name} alone")
        assert all(torch.equal(factor, theirs[name]) for name, factor in ours.items())


def test_a_smaller_rank_is_exact(tmp_path: Path) -> None:
    padded, own = learner_of(max_rank=8), learner_of(max_rank=2)
    for learner in (padded, own):
        learner.create("tenant", rank=2, seed=3, unembedding=True)
    for one, other in zip(trained(padded, "tenant", range(4)), trained(own, "tenant", range(4)), strict=True):
        assert one.metrics["loss:sum"] == pytest.approx(other.metrics["loss:sum"], rel=1e-5)
    ours, theirs = (exported(one, "tenant", tmp_path / str(one.max_rank)) for one in (padded, own))
    for name, factor in ours.items():
        torch.testing.assert_close(factor, theirs[name], atol=1e-5, rtol=1e-5)


def test_an_adapter_starts_as_that_of_a_run_and_adds_nothing(tmp_path: Path) -> None:
    learner = learner_of()
    learner.create("tenant", rank=4, seed=7)
    learner.create("other", rank=8, seed=8, mlp=False, unembedding=True)
    datums = synthetic_datums(0)
    one, other = (learner.forward_backward(name, datums, "ppo", {}, backward=False) for name in ("tenant", "other"))
    np.testing.assert_allclose(np.concatenate(one.logprobs), np.concatenate(other.logprobs), atol=1e-6)
    a = exported(learner, "tenant", tmp_path)["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    assert torch.equal(a, first_factor("decoder.layers.1.mlp.linear_fc2", 7, 4, TINY.ffn))


def test_a_pass_without_gradients_leaves_none() -> None:
    learner, other = learner_of(), learner_of()
    for one in (learner, other):
        one.create("tenant", rank=4, seed=7)
    learner.forward_backward("tenant", synthetic_datums(5), "ppo", {}, backward=False)
    assert same(trained(learner, "tenant", range(2)), trained(other, "tenant", range(2)))


def test_a_step_without_gradients_is_one_of_zeros() -> None:
    learner = learner_of()
    learner.create("tenant", rank=4, seed=7)
    assert learner.optim_step("tenant", **ADAM) == {"grad_norm": 0.0, "step": 1.0}
    trained(learner, "tenant", range(1))
    before = learner.forward_backward("tenant", synthetic_datums(3), "ppo", {}, backward=False)
    learner.optim_step("tenant", **ADAM)  # the moments move it
    assert not same([before], [learner.forward_backward("tenant", synthetic_datums(3), "ppo", {}, backward=False)])


def test_in_bfloat16_small_steps_add_up() -> None:
    """The adapters of the model are bfloat16, those of the tenant float32."""
    wide, half = learner_of(), learner_of(options=dataclasses.replace(ONE, dtype="bfloat16"))
    for learner in (wide, half):
        learner.create("tenant", rank=4, seed=7, unembedding=True)
        for step in range(40):
            learner.forward_backward("tenant", synthetic_datums(step % 2), "cross_entropy", {}, backward=True)
            learner.optim_step("tenant", **(ADAM | {"learning_rate": 1e-4}))
    losses = [
        learner.forward_backward("tenant", synthetic_datums(0), "cross_entropy", {}, backward=False).metrics["loss:sum"]
        for learner in (wide, half)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_ranks_call_tenants_as_they_call_a_run() -> None:
    with_calls, learner = learner_of(), learner_of()
    everyone = RankZero(with_calls, None, 1)
    everyone.call(TenantLearner.create, "tenant", rank=4, seed=7)
    learner.create("tenant", rank=4, seed=7)
    datums = synthetic_datums(1)
    ours = everyone.call(TenantLearner.forward_backward, "tenant", datums, "ppo", {}, backward=True)
    assert same([ours], [learner.forward_backward("tenant", datums, "ppo", {}, backward=True)])
