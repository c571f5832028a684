"""Megatron's model and step against transformers and torch, in one process without a port."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import psutil
import pytest
import torch

from tests.fakes.batches import synthetic_rows
from tests.reference.plain import PlainLearner
from turnlog.infra.blobs import StoreUnreachable
from turnlog.processors.core.batches.gaps import logprob_gaps
from turnlog.schemas.events.batches import gaps_of_kinds
from turnlog.schemas.types import BlobRef
from turnlog.settings import StoreSettings
from turnlog.trainer import (
    BooksOff,
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointUnusable,
    WeightsMismatch,
    mcore,
)
from turnlog.trainer.algorithms.objective import Columns
from turnlog.trainer.checkpoints.places import FolderPlace, StorePlace, file_sha256
from turnlog.trainer.checkpoints.state import Save, read_common
from turnlog.trainer.families.family import as_dict
from turnlog.trainer.families.shape import TINY, TINY_MIXTURE, ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner, _Forward
from turnlog.trainer.plan import LearnerOptions, PolicyGradient, imitation
from turnlog.trainer.warm_start import random_weights

OBJECTIVE = PolicyGradient(0.2, 0.2)
ONE = LearnerOptions(threads=1)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


QWEN2 = dataclasses.replace(TINY, kind="qwen2", qkv_bias=True, qk_norm=False)


def test_what_a_step_held_goes_back_to_the_system() -> None:
    learner = Learner(TINY, random_weights(TINY, 1), ONE)
    learner.step(synthetic_rows(1, rows=64), OBJECTIVE, 1e-3)
    held = psutil.Process().memory_info().rss
    ctypes.CDLL(None).malloc_trim(0)
    assert held - psutil.Process().memory_info().rss < 4 << 20


def test_steps_are_those_of_transformers_and_adamw() -> None:
    weights = random_weights(TINY, 1)
    learner = Learner(TINY, weights, dataclasses.replace(ONE, microbatch_tokens=200))
    plain = PlainLearner(TINY, weights, ONE)
    for step in range(4):
        rows = synthetic_rows(step)
        ours, theirs = learner.step(rows, OBJECTIVE, 1e-3), plain.step(rows, OBJECTIVE, 1e-3)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    after = plain.export()
    assert max(float((tensor - after[name]).abs().max()) for name, tensor in learner.export().items()) < 1e-5


@pytest.mark.parametrize("shape", [QWEN2, TINY_MIXTURE], ids=lambda shape: shape.kind)
def test_weight_decay_is_of_matrices_alone(shape: ModelShape) -> None:
    weights, options = random_weights(shape, 1), dataclasses.replace(ONE, weight_decay=0.1)
    learner, plain = Learner(shape, weights, options), PlainLearner(shape, weights, options)
    rows = synthetic_rows(0)
    still = dataclasses.replace(rows, advantages=rows.advantages * 0)
    learner.step(still, OBJECTIVE, 0.1)
    shares = {name: (tensor, 1.0 if tensor.dim() == 1 else 0.99) for name, tensor in weights.items()}
    assert {share for _, share in shares.values()} == {0.99, 1.0}
    for name, tensor in learner.export().items():
        was, share = shares[name]
        torch.testing.assert_close(tensor, share * was)
    plain.step(still, OBJECTIVE, 0.1)
    for step in range(2):
        ours, theirs = (one.step(synthetic_rows(step), OBJECTIVE, 1e-2) for one in (learner, plain))
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)


@pytest.mark.parametrize("shape", [TINY, TINY_MIXTURE], ids=lambda shape: shape.kind)
def test_adapters_take_the_steps_of_a_plain_low_rank_model_and_nothing_else_moves(
    tmp_path: Path, shape: ModelShape
) -> None:
    weights, options = random_weights(shape, 1), dataclasses.replace(ONE, lora_rank=4, lora_alpha=8.0)
    learner, plain = Learner(shape, weights, options), PlainLearner(shape, weights, options)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in learner.export().items())
    for step in range(3):
        rows = synthetic_rows(step)
        ours, theirs = learner.step(rows, OBJECTIVE, 1e-2), plain.step(rows, OBJECTIVE, 1e-2)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    after = learner.export()
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, weights[name])}
    kinds = "qkvo" if shape.experts else ("q", "k", "v", "o", "gate", "up", "down")
    assert {name.split(".")[-2] for name in moved} == {f"{kind}_proj" for kind in kinds}
    learner.save(tmp_path, {})
    other = Learner(shape, random_weights(shape, 9), options)
    other.restore(tmp_path)
    assert all(torch.equal(tensor, after[name]) for name, tensor in other.export().items())
    with pytest.raises(CheckpointUnusable, match="lora_rank"):
        Learner(shape, weights, ONE).restore(tmp_path)


@pytest.mark.parametrize("shape", [TINY, TINY_MIXTURE], ids=lambda shape: shape.kind)
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_computing_layers_again_changes_no_bit(shape: ModelShape, lora_rank: int) -> None:
    results = []
    for recompute in ("none", "full"):
        options = dataclasses.replace(ONE, recompute=recompute, lora_rank=lora_rank)
        learner = Learner(shape, random_weights(shape, 1), options)
        results.append((learner.step(synthetic_rows(0), OBJECTIVE, 1e-3), learner.export()))
    (once, exported), (again, other) = results
    assert once == again
    assert all(torch.equal(tensor, other[name]) for name, tensor in exported.items())


def test_measures_are_taken_before_the_step() -> None:
    learner = Learner(TINY, random_weights(TINY, 1), ONE)
    rows = synthetic_rows(0)
    before = learner.measure(rows, OBJECTIVE)
    stepped = learner.step(rows, OBJECTIVE, 1e-2)
    assert dataclasses.replace(stepped, grad_norm=0.0) == before
    assert learner.measure(rows, OBJECTIVE).loss < before.loss
    assert before.entropy == pytest.approx(np.log(TINY.vocabulary), rel=0.01)


def test_the_gap_of_tokens_on_an_old_cache_is_one_of_its_own() -> None:
    learner, rows = (
        Learner(TINY, random_weights(TINY, 1), dataclasses.replace(ONE, microbatch_tokens=200)),
        synthetic_rows(0),
    )
    trained = rows.trained == 1
    marked = (np.random.default_rng(1).random(len(trained)) < 0.3).astype("|u1")
    apart = np.abs(learner.logprobs(rows) - rows.logprobs)
    whole = learner.measure(rows, OBJECTIVE)
    split = learner.measure(dataclasses.replace(rows, old_cache=marked), OBJECTIVE)
    own, old = apart[trained & (marked == 0)], apart[trained & (marked == 1)]
    assert (split.logprob_gap_max, split.logprob_gap_mean) == pytest.approx((own.max(), own.mean()), rel=1e-5)
    assert (split.old_cache_gap_max, split.old_cache_gap_mean) == pytest.approx((old.max(), old.mean()), rel=1e-5)
    assert (split.old_cache_tokens, whole.old_cache_tokens) == (len(old), 0)
    assert (split.loss, split.entropy) == (whole.loss, whole.entropy)
    assert whole.logprob_gap_max == max(split.logprob_gap_max, split.old_cache_gap_max)


def test_gaps_of_the_weights_held_are_over_the_tokens_that_they_sampled() -> None:
    rows = synthetic_rows(0)
    oldest, newest = rows.version_min.copy(), rows.version_max.copy()
    oldest[:], newest[:] = 1, 1  # of the version before
    newest[1:3] = 2  # of both, in this order
    oldest[3:5], newest[3:5] = 2, 2
    oldest[5], newest[5] = 0, 2  # who knows which of its tokens on an older cache are of which
    marked = (np.random.default_rng(1).random(len(rows.trained)) < 0.5).astype("|u1")
    rows = dataclasses.replace(rows, version_min=oldest, version_max=newest, old_cache=marked)
    learner = Learner(TINY, random_weights(TINY, 1), dataclasses.replace(ONE, microbatch_tokens=200))
    apart, row = np.abs(learner.logprobs(rows) - rows.logprobs), np.repeat(np.arange(len(rows)), rows.lengths)
    trained, alone, changed = rows.trained == 1, (row == 3) | (row == 4), (row == 1) | (row == 2)
    found = learner.step(rows, OBJECTIVE, 0.0, held=2).metrics
    wanted = apart[trained & alone & (marked == 0)].max(), apart[trained & (alone | changed) & (marked == 1)].max()
    assert (found["held_gap_max"], found["held_old_cache_gap_max"]) == pytest.approx(wanted, rel=1e-5)
    for other in (None, 7):
        assert not {name for name in learner.step(rows, OBJECTIVE, 0.0, held=other).metrics if "held" in name}


def test_gaps_of_kinds_of_engines_are_over_the_tokens_that_they_sampled() -> None:
    rows = synthetic_rows(0)
    draw = np.random.default_rng(1)
    kinds = draw.integers(0, 3, len(rows.trained)).astype("|u1")
    kinds[rows.starts[-1] :] = 0  # a record that does not name the kind
    marked = (draw.random(len(kinds)) < 0.3).astype("|u1")
    newest = rows.version_max.copy()
    newest[:4] = 2
    rows = dataclasses.replace(
        rows, version_min=newest, version_max=newest, old_cache=marked, engine_kind=kinds,
        logprobs=np.where(kinds == 2, rows.logprobs - 1, rows.logprobs).astype("<f4"),
    )  # fmt: skip
    learner = Learner(TINY, random_weights(TINY, 1), dataclasses.replace(ONE, microbatch_tokens=200))
    of_trainer = learner.logprobs(rows)
    apart, of_row = np.abs(of_trainer - rows.logprobs), np.repeat(np.arange(len(rows)), rows.lengths)
    found = learner.step(rows, OBJECTIVE, 0.0, held=2)
    for number, kind in enumerate(("sglang", "vllm"), 1):
        own = (rows.trained == 1) & (marked == 0) & (kinds == number)
        wanted = apart[own].max(), apart[own].mean(), apart[own & (newest[of_row] == 2)].max()
        names = ("logprob_gap_max", "logprob_gap_mean", "held_gap_max")
        assert [found.metrics[f"{name}/{kind}"] for name in names] == pytest.approx(wanted, rel=1e-5)
    assert found.metrics["logprob_gap_max/vllm"] > found.metrics["logprob_gap_max/sglang"]
    assert len(gaps_of_kinds(found.metrics, "logprob_gap_max")) == 2, "tokens without a kind count for none"
    reported = logprob_gaps(rows, of_trainer, 2)
    assert reported.metrics == pytest.approx({name: found.metrics[name] for name in reported.metrics}, rel=1e-5)
    assert len(reported.metrics) == 8
    for name in ("logprob_gap_max", "logprob_gap_mean", "old_cache_gap_max", "old_cache_gap_mean"):
        assert getattr(reported, name) == pytest.approx(getattr(found, name), rel=1e-5)
    unnamed = dataclasses.replace(rows, engine_kind=None)
    forward = _Forward(OBJECTIVE, Columns(), unnamed, rows.temperature <= 0, 1, False, None)
    assert (forward.kind_sums.numel(), forward.kind_gap_max.numel()) == (0, 0), "a batch without kinds costs nothing"
    of_one_kind = dataclasses.replace(rows, engine_kind=np.ones_like(kinds))
    assert set(gaps_of_kinds(learner.measure(of_one_kind, OBJECTIVE).metrics, "logprob_gap_max")) == {"sglang"}
    assert not gaps_of_kinds(
        learner.measure(dataclasses.replace(rows, engine_kind=None), OBJECTIVE).metrics, "held_gap_max"
    )


def test_a_row_without_advantage_still_runs_and_moves_nothing() -> None:
    weights = random_weights(TINY, 1)
    learner = Learner(TINY, weights, ONE)
    rows = synthetic_rows(0)
    result = learner.step(dataclasses.replace(rows, advantages=rows.advantages * 0), OBJECTIVE, 1e-2)
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
    assert result.trained_tokens == int(rows.trained.sum())


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    weights = random_weights(TINY, 1)
    learner = Learner(TINY, weights, ONE)
    rows = synthetic_rows(0)
    broken = dataclasses.replace(rows, advantages=np.where(rows.trained, np.float32(3e38), np.float32(0)))
    result = learner.step(broken, OBJECTIVE, 1e-2)
    assert result.skipped
    assert all(torch.equal(tensor, weights[name]) for name, tensor in learner.export().items())
    assert not learner.step(rows, OBJECTIVE, 1e-2).skipped


def test_books_that_do_not_balance_stop_the_step() -> None:
    weights = random_weights(TINY, 1)
    learner = Learner(TINY, weights, ONE)
    rows = synthetic_rows(0)
    trained = rows.trained.copy()
    trained[0] = 1
    with pytest.raises(BooksOff):
        learner.step(dataclasses.replace(rows, trained=trained), imitation, 1e-2)
    with pytest.raises(BooksOff, match="the batch has no rows"):
        learner.step(rows.among(np.zeros(len(rows), bool)), imitation, 1e-2)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in learner.export().items())


def test_microbatching_changes_rounding_only() -> None:
    rows = synthetic_rows(7)
    results = []
    for limit in (10_000, 100):
        learner = Learner(TINY, random_weights(TINY, 1), dataclasses.replace(ONE, microbatch_tokens=limit))
        results.append(learner.step(rows, OBJECTIVE, 1e-3))
    assert results[0].loss == pytest.approx(results[1].loss, abs=1e-6)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)


@pytest.mark.parametrize("shape", [TINY, TINY_MIXTURE], ids=lambda shape: shape.kind)
def test_a_checkpoint_goes_on_bit_for_bit_with_its_cursor(tmp_path: Path, shape: ModelShape) -> None:
    learner = Learner(shape, random_weights(shape, 1), ONE)
    for step in range(2):
        learner.step(synthetic_rows(step), OBJECTIVE, 1e-3)
    learner.save(tmp_path, {"cursor": {"next_batch": 2}})
    wanted = learner.step(synthetic_rows(2), OBJECTIVE, 1e-3)
    after = learner.export()
    other = Learner(shape, random_weights(shape, 9), ONE)
    other.restore(tmp_path)
    assert read_common(tmp_path)["cursor"] == {"next_batch": 2}
    assert other.step(synthetic_rows(2), OBJECTIVE, 1e-3) == wanted
    assert all(torch.equal(tensor, after[name]) for name, tensor in other.export().items())


@pytest.mark.parametrize("reshardable", [True, False], ids=["reshardable", "by place"])
@pytest.mark.parametrize("shape", [TINY, TINY_MIXTURE], ids=lambda shape: shape.kind)
def test_what_is_saved_is_the_state_at_the_save_though_steps_go_on_meanwhile(
    tmp_path: Path, shape: ModelShape, reshardable: bool
) -> None:
    begun = threading.Event()

    class Late(Save):
        """Writes when it is told to."""

        def _write(self, buckets: list[Any]) -> None:
            begun.wait()
            super()._write(buckets)

    learner = Learner(shape, random_weights(shape, 1), ONE)
    learner.step(synthetic_rows(0), OBJECTIVE, 1e-3)
    said = {"shape": as_dict(shape)}
    save = Late(*learner.states(), tmp_path, said, reshardable=reshardable)
    sizes = [tensor.numel() for tensor in learner.policy.model.parameters()]
    padding = 0 if reshardable else 12 * 64 * len(sizes)
    assert (4 + 12) * sum(sizes) <= save.bytes <= (4 + 12) * sum(sizes) + padding
    assert save.finish(wait=False) is None
    wanted = [learner.step(synthetic_rows(step), OBJECTIVE, 1e-3) for step in (1, 2)]
    begun.set()
    assert save.finish(wait=True) is not None
    other = Learner(shape, random_weights(shape, 9), ONE)
    other.restore(tmp_path)
    assert [other.step(synthetic_rows(step), OBJECTIVE, 1e-3) for step in (1, 2)] == wanted
    after = learner.export()
    assert all(torch.equal(tensor, after[name]) for name, tensor in other.export().items())


def test_a_checkpoint_by_place_is_refused_by_ranks_that_share_the_model_otherwise(tmp_path: Path) -> None:
    learner = Learner(TINY, random_weights(TINY, 1), ONE)
    Save(*learner.states(), tmp_path, {"shape": as_dict(TINY)}, reshardable=False).finish(wait=True)
    said = read_common(tmp_path)
    mcore.rewrite_common(tmp_path, {**said, "shards": {**said["shards"], "tensor_parallel": 2}})
    with pytest.raises(CheckpointUnusable, match="checkpoints_reshardable = true"):
        learner.restore(tmp_path)
    other = Learner(TINY, random_weights(TINY, 9), ONE)
    other.restore_weights(tmp_path)  # for an export
    wanted = learner.export()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in other.export().items())


def test_a_checkpoint_by_place_is_refused_where_gradients_lie_in_other_buckets(tmp_path: Path) -> None:
    """The optimizer's values lie bucket by bucket."""
    early = dataclasses.replace(ONE, overlap_grad_reduce=True)
    learner = Learner(TINY, random_weights(TINY, 1), early)
    Save(*learner.states(), tmp_path, {"shape": as_dict(TINY)}, reshardable=False).finish(wait=True)
    with pytest.raises(CheckpointUnusable, match=r"overlap_grad_reduce.*checkpoints_reshardable = true"):
        Learner(TINY, random_weights(TINY, 1), ONE).restore(tmp_path)
    Learner(TINY, random_weights(TINY, 1), early).restore(tmp_path)


def test_a_model_that_is_called_by_itself_after_a_packed_step_computes_rows_of_any_number() -> None:
    learner = Learner(TINY, random_weights(TINY, 1), dataclasses.replace(ONE, packing="on"))
    learner.step(synthetic_rows(0), imitation, 0.0)
    tokens, positions = torch.arange(12).view(2, 6), torch.arange(6).expand(2, -1)
    with mcore.quiet(), torch.no_grad():
        both = learner.policy.model(tokens, positions, None)
        each = [learner.policy.model(tokens[row : row + 1], positions[:1], None)[0] for row in range(2)]
    torch.testing.assert_close(both, torch.stack(each))


def test_a_rank_hashes_what_it_writes_and_verifies_what_it_loads(tmp_path: Path) -> None:
    learner = Learner(TINY, random_weights(TINY, 1), ONE)
    learner.begin_save(tmp_path, {})
    stored = learner.finish_save(True)
    shard = tmp_path / "__0_0.distcp"
    assert stored == {shard.name: BlobRef(file_sha256(shard), shard.stat().st_size)}
    FolderPlace(tmp_path.parent).store_files(tmp_path, stored, {})
    learner.restore(tmp_path)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"__0_0\.distcp was altered"):
        learner.restore(tmp_path)


def test_a_part_that_cannot_be_written_fails_the_checkpoint_when_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").mkdir()
    learner = Learner(TINY, random_weights(TINY, 1), ONE)
    learner.begin_save(tmp_path, {})
    with pytest.raises(CheckpointFailed, match="Is a directory"):
        learner.finish_save(True)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    Learner(TINY, random_weights(TINY, 1), ONE).save(tmp_path, {})
    other = dataclasses.replace(TINY, ffn=64)
    with pytest.raises(CheckpointUnusable, match="another model"):
        Learner(other, random_weights(other, 1), ONE).restore(tmp_path)


def test_a_checkpoint_in_a_store_goes_on_bit_for_bit_on_another_machine(tmp_path: Path, store: StoreSettings) -> None:
    here, there = (StorePlace(store, f"owned/{uuid4().hex}/checkpoints", tmp_path / name) for name in ("here", "there"))
    there = dataclasses.replace(there, prefix=here.prefix)
    learner = Learner(TINY, random_weights(TINY, 1), ONE, place=here)
    learner.step(synthetic_rows(0), imitation, 1e-2)
    folder = here.create_folder("step-00000001-i0")
    learner.begin_save(folder, {"cursor": {"next_batch": 2}})
    stored = learner.finish_save(True)
    assert stored is not None
    assert list(stored) == ["__0_0.distcp"], "what the rank has written is put by the rank"
    here.store_files(folder, stored, {})
    other = Learner(TINY, random_weights(TINY, 9), ONE, place=there)
    with pytest.raises(CheckpointDamaged, match="is gone"):
        other.restore(folder)
    name = here.seal(folder)
    other.restore(folder)
    assert read_common(there.cache / name)["cursor"] == {"next_batch": 2}
    assert other.step(synthetic_rows(1), imitation, 1e-2) == learner.step(synthetic_rows(1), imitation, 1e-2)


def test_a_store_that_is_away_fails_a_checkpoint_by_its_address_and_the_learner_goes_on(tmp_path: Path) -> None:
    away = StoreSettings(endpoint="http://127.0.0.1:9", secret_key="key")
    learner = Learner(TINY, random_weights(TINY, 1), ONE, place=StorePlace(away, "owned/checkpoints", tmp_path))
    learner.begin_save(tmp_path / "step-00000000-i0", {"cursor": {}})
    with pytest.raises(StoreUnreachable, match=r"127\.0\.0\.1:9"):
        learner.finish_save(True)
    assert not learner.step(synthetic_rows(0), imitation, 1e-2).skipped


def test_half_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable, match="no complete checkpoint"):
        Learner(TINY, random_weights(TINY, 1), ONE).restore(tmp_path)


def test_weights_of_another_shape_are_refused() -> None:
    weights = random_weights(TINY, 1)
    weights["model.norm.weight"] = torch.ones(3)
    with pytest.raises(WeightsMismatch, match=r"model\.norm\.weight"):
        Learner(TINY, weights, ONE)


def test_bfloat16_learns(tmp_path: Path) -> None:
    learner = Learner(TINY, random_weights(TINY, 1), dataclasses.replace(ONE, dtype="bfloat16"))
    losses = [learner.step(synthetic_rows(0), imitation, 1e-2).loss for _ in range(8)]
    assert losses[-1] < losses[0]
    assert {tensor.dtype for tensor in learner.export().values()} == {torch.bfloat16}
