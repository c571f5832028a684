"""Rows that share prefixes train as rows that are computed alone, and each shared token is computed once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.profiler import ProfilerActivity, profile

from tests.each import each
from tests.fakes.batches import branched_rows, synthetic_rows, with_random_experts, with_random_pictures
from tests.fakes.recorded_rows import recorded_rows
from tests.proofs import families_with
from tests.reference.layouts import OBJECTIVES, Theirs, learner_of, ours
from tests.reference.parity import nontrivial_weights
from tests.reference.plain import PlainLearner
from tests.reference.small_models import SMALL
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import mcore, trees
from turnlog.trainer.algorithms.draws import METHODS
from turnlog.trainer.algorithms.objective import ForwardPassResults
from turnlog.trainer.algorithms.tokens import BUILT_IN, CriticRules
from turnlog.trainer.families.costs import row_flops
from turnlog.trainer.families.shape import TINY, TINY_HYBRID, TINY_MIXTURE, TINY_VISION, ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.models.attention import PackedRows, SdpaAttention
from turnlog.trainer.models.experts import unrouted_rows
from turnlog.trainer.models.tree import MASK_BLOCK, PrefixTree, block_mask, flex_attention, grow_tree, tree_kernel
from turnlog.trainer.network import model_config
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.warm_start import random_weights

ONE = LearnerOptions(threads=1, microbatch_tokens=200)
OBJECTIVE = PolicyGradient(0.2, 0.2)
OWN, SHARED = [9, 4, 0, 6, 3], [0, 7, 5, 2, 0]
"""Rows of a tree: its own tokens, and those of the row before it."""


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def watched(learner: Learner) -> list[int]:
    """The number of tokens that the policy is given, by microbatch."""
    given = list[int]()
    learner.policy.model.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].numel()))
    return given


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: one.main_grad.clone() for name, one in learner.policy.model.named_parameters() if one.requires_grad}


def rows_of(shape: ModelShape, seed: int) -> BatchRows:
    """Return rows that branch; of a mixture with recorded experts, except for every third row."""
    rows = synthetic_rows(seed)
    return branched_rows(with_random_experts(rows, shape, seed, some=True) if shape.mixture else rows, seed)


@each("kind", [kind for kind in families_with("packing") if not SMALL[kind].vision and not SMALL[kind].linear])
def test_steps_of_every_family_are_those_of_transformers(kind: str) -> None:
    shape = SMALL[kind]
    weights = nontrivial_weights(shape, 1)
    learner, plain = Learner(shape, weights, ONE), PlainLearner(shape, weights, ONE)
    for seed in range(2):
        rows, seen = rows_of(shape, seed), watched(learner)
        found, wanted = learner.step(rows, OBJECTIVE, 1e-3), plain.step(rows, OBJECTIVE, 1e-3)
        assert found.loss == pytest.approx(wanted.loss, abs=1e-5)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
        assert sum(seen) < 0.8 * (rows.lengths - 1).sum()


@each("name", OBJECTIVES)
def test_steps_of_a_draw_are_those_of_transformers_by_each_objective(name: str) -> None:
    objective, batches = OBJECTIVES[name], [branched_rows(synthetic_rows(seed, segments=2), seed) for seed in range(2)]
    one, plain = learner_of(TINY, ONE, objective), Theirs(TINY, ONE, objective)
    seen = watched(one)
    for (loss, norm), (wanted_loss, wanted_norm) in zip(
        ours(one, objective, batches), plain.draw(batches), strict=True
    ):
        assert loss == pytest.approx(wanted_loss, abs=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
    passes = 1 + objective.reads_current + len(objective.passes(2) & {"proximal", "reference"})
    assert sum(seen) < 0.6 * passes * sum(int((rows.lengths - 1).sum()) for rows in batches)


@each("name", BUILT_IN)
@each("changed", [{}, {"recompute": "full"}, {"lora_rank": 4}])
def test_every_gradient_and_figure_is_that_of_rows_alone(name: str, changed: dict[str, Any]) -> None:
    algorithm = BUILT_IN[name]
    critic = CriticRules(discount=0.99, smoothing=0.9, rate=1e-3, clip=0.2) if algorithm.critic else None
    objective = PolicyGradient(
        0.2, 0.2, algorithm=algorithm, numbers=tuple(algorithm.arguments.values()), critic=critic,
        entropy_coefficient=0.1, teacher=1.0 if algorithm.distils else None,
    )  # fmt: skip
    rows, found = branched_rows(synthetic_rows(3, segments=2), 3), list[Any]()
    for sharing in ("off", "auto"):
        one = learner_of(TINY, dataclasses.replace(ONE, prefix_sharing=sharing, **changed), objective)
        seen = watched(one)
        numbers = ForwardPassResults(**{what: METHODS[what](one, rows) for what in sorted(objective.passes(1))})
        result = one.step(rows, objective, 0.0, numbers, tell_tokens=True)
        found.append((result, gradients(one), sum(seen)))
    (wanted, its_gradients, all_tokens), (result, own_gradients, tokens) = found
    assert tokens < 0.6 * all_tokens
    assert result.loss == pytest.approx(wanted.loss, abs=1e-6)
    for parameter, gradient in own_gradients.items():
        torch.testing.assert_close(gradient, its_gradients[parameter], rtol=1e-5, atol=1e-6, msg=parameter)
    assert (result.trained_tokens, result.masked) == (wanted.trained_tokens, wanted.masked)
    for figure, values in (wanted.tokens or {}).items():
        np.testing.assert_allclose((result.tokens or {})[figure], values, atol=1e-5)


def test_a_token_that_trains_in_several_rows_has_one_log_prob() -> None:
    rows = synthetic_rows(0, rows=2, lengths=np.array([40, 40], "<i4"))
    rows = dataclasses.replace(rows, token_ids=np.tile(rows.token_ids[:40], 2))
    warm = dataclasses.replace(rows, temperature=np.ones(2, "<f4"))
    learner = Learner(TINY, random_weights(TINY, 1), ONE)
    found = learner.logprobs(warm).reshape(2, 40)
    both = (warm.trained.reshape(2, 40) == 1).all(0)
    assert both.any()
    np.testing.assert_array_equal(found[0, both], found[1, both])
    apart = learner.logprobs(dataclasses.replace(rows, temperature=np.array([1.0, 0.7], "<f4"))).reshape(2, 40)
    assert (apart[0, both] != apart[1, both]).all()


def test_values_are_those_of_rows_alone() -> None:
    rows = branched_rows(synthetic_rows(0), 0)
    found = [
        learner_of(TINY, dataclasses.replace(ONE, prefix_sharing=one), OBJECTIVES["ppo"]).values(rows)
        for one in ("off", "auto")
    ]
    np.testing.assert_allclose(*found, atol=1e-6)


def test_experts_that_engines_chose_differently_are_not_shared() -> None:
    rows = branched_rows(with_random_experts(synthetic_rows(0), TINY_MIXTURE, 0), 0)
    experts = rows.experts.copy()
    experts[rows.starts[1::2] + 8] = experts[rows.starts[1::2] + 8][..., ::-1]
    changed = dataclasses.replace(rows, experts=experts)
    counts = []
    for one in (rows, changed):
        learner, plain = (of(TINY_MIXTURE, random_weights(TINY_MIXTURE, 1), ONE) for of in (Learner, PlainLearner))
        counts.append(watched(learner))
        found, wanted = learner.step(one, OBJECTIVE, 1e-3), plain.step(one, OBJECTIVE, 1e-3)
        assert found.loss == pytest.approx(wanted.loss, abs=1e-5)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert sum(counts[0]) < sum(counts[1]) < (rows.lengths - 1).sum()


@each(
    ("shape", "options", "reason"),
    [
        (TINY, {"packing": "off"}, "trainer.packing is off"),
        (TINY, {"context_parallel": 2}, "context-parallel ranks"),
        (TINY_MIXTURE, {"moe_aux_loss_coeff": 0.1}, "trainer.moe_aux_loss_coeff"),
        (TINY_HYBRID, {}, "GatedDeltaNet, in layer 0 of a qwen3_5_text"),
        (TINY_VISION, {}, "images"),
        (TINY, {}, None),
    ],
)
def test_what_trees_cannot_compute_is_named(shape: ModelShape, options: dict[str, Any], reason: str | None) -> None:
    rows = synthetic_rows(0)
    rows = with_random_pictures(rows, shape, 0) if shape.vision else rows
    found = trees.obstacle(shape, LearnerOptions(**options), rows)
    assert found is None if reason is None else reason in (found or "")


@each(("shape", "packing"), [(TINY_HYBRID, "auto"), (TINY, "off")])
def test_rows_that_cannot_share_are_computed_alone(shape: ModelShape, packing: str) -> None:
    rows = branched_rows(synthetic_rows(0), 0)
    learner = Learner(shape, random_weights(shape, 1), dataclasses.replace(ONE, packing=packing))
    seen = watched(learner)
    learner.measure(rows, OBJECTIVE)
    assert sum(seen) >= (rows.lengths - 1).sum()


def test_the_log_says_once_why_rows_are_computed_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "turnlog.trainer.trees")
    for _ in range(2):
        trees.report_obstacle("this test says so")
    assert [one.getMessage() for one in caplog.records] == [
        "every row is computed alone, also what it shares with others (trainer.prefix_sharing): this test says so"
    ]


def planned(rows: BatchRows, ranks: int, limit: int) -> trees.TreePlan | None:
    cost = functools.partial(row_flops, TINY)
    return trees.plan_trees(rows, ranks, limit, cost=cost, kinds=unrouted_rows(rows).tolist())


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(30, 600))
def test_plans_have_every_row_once_share_what_is_the_same_and_keep_the_limit(seed: int, ranks: int, limit: int) -> None:
    rows = branched_rows(synthetic_rows(seed), seed)
    plan = planned(rows, ranks, limit)
    assert plan is not None
    assert sorted(row for rank in plan.microbatches for one in rank for row in one) == list(range(len(rows)))
    assert len({len(rank) for rank in plan.microbatches}) == 1
    inputs = [
        rows.token_ids[start : start + length - 1] for start, length in zip(rows.starts, rows.lengths, strict=True)
    ]
    for one in (one for rank in plan.microbatches for one in rank):
        assert sum(int(rows.lengths[row] - plan.shared[row]) for row in one) <= limit or len(one) == 1
        for before, row in zip((None, *one), one, strict=False):
            kept = int(plan.shared[row])
            assert kept == 0 or before is not None
            if before is not None:
                np.testing.assert_array_equal(inputs[row][:kept], inputs[before][:kept])
                assert kept <= min(len(inputs[row]), len(inputs[before]))


def test_one_group_is_cut_for_several_ranks() -> None:
    rows = synthetic_rows(0, lengths=np.full(16, 48, "<i4"))
    ids = rows.token_ids.reshape(16, 48)
    ids[:, :32] = ids[0, :32]
    rows = dataclasses.replace(rows, token_ids=ids.reshape(-1))
    whole, cut = planned(rows, 1, 10**6), planned(rows, 4, 10**6)
    assert whole is not None
    assert cut is not None
    assert [len(one) for rank in whole.microbatches for one in rank] == [16]
    assert [len(one) for rank in cut.microbatches for one in rank] == [4] * 4
    assert cut.cost < whole.cost


def test_a_rank_without_rows_has_a_stand_in() -> None:
    rows = branched_rows(synthetic_rows(0, rows=4), 0)
    plan = planned(rows, 3, 10**6)
    assert plan is not None
    found = trees.lay_out_tree(rows, (), plan.shared, rows.trained == 1, multiple=4)
    assert (found.inputs.shape, float(found.weights.sum()), found.scored is not None) == ((1, 4), 0.0, True)


@each(("program", "most"), [("claude-code", 0.35), ("codex", 0.3), ("opencode", 0.3)])
def test_of_a_group_s_recorded_sessions_little_is_computed(program: str, most: float) -> None:
    rows = recorded_rows(program)
    plan = planned(rows, 1, LearnerOptions().microbatch_tokens)
    assert plan is not None
    assert 1 - plan.shared.sum() / rows.lengths.sum() < most


def by_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: PrefixTree, window: int, scale: float) -> Any:
    """Attend under one mask over all pairs, with the arguments of a TreeKernel."""
    at = torch.arange(len(q), device=q.device)
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    seen = tree.mask(window)(None, None, at[:, None], at)
    scores = torch.einsum("ihd,jhd->hij", q, k).double() * scale
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.double()).float()


def attention(window: tuple[int, int] | None = None) -> SdpaAttention:
    with mcore.quiet():
        config = dataclasses.replace(model_config(TINY, LearnerOptions()), window_size=window)
        return SdpaAttention(config, 1, None, "self")


def attended(
    own: Sequence[int], shared: Sequence[int], window: tuple[int, int] | None, kernel: Any = None, device: str = "cpu"
) -> list[torch.Tensor]:
    """The output of a tree's attention, and the gradients of what it is made of. `kernel` replaces what is found."""
    torch.manual_seed(0)
    tree, _ = grow_tree(own, shared, torch.device(device))
    made = [torch.randn(sum(own), heads, 16, device=device, requires_grad=True) for heads in (4, 2, 2)]
    one = attention(window)
    if kernel is not None:
        one.tree_kernel = lambda *_: kernel  # type: ignore[method-assign]
    found = one(*made, None, packed_seq_params=PackedRows((0, sum(own)), device, tree))
    return [found, *torch.autograd.grad((found * torch.randn_like(found)).sum(), made)]


@each("window", [None, (3, 0)])
@each(("own", "shared"), [(OWN, SHARED), ([7], [0]), ([600, 600], [0, 550])])
def test_a_call_for_each_branch_gives_what_the_mask_gives(
    own: list[int], shared: list[int], window: tuple[int, int] | None
) -> None:
    for found, wanted in zip(attended(own, shared, window), attended(own, shared, window, by_mask), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@each("window", [0, 4])
def test_flex_attention_takes_the_mask_of_the_tree(window: int) -> None:
    """Without its compiler, which the test would wait for, and without gradients, which it has on CUDA alone."""
    torch.manual_seed(0)
    tree, _ = grow_tree(OWN, SHARED, torch.device("cpu"))
    made = [torch.randn(sum(OWN), heads, 16) for heads in (4, 2, 2)]
    found = flex_attention(*made, tree, window, 0.25, attend=torch_flex_attention)
    torch.testing.assert_close(found, by_mask(*made, tree, window, 0.25), rtol=1e-4, atol=1e-5)


@each("window", [0, 100])
@each(("own", "shared"), [([500, 300, 90], [0, 380, 200]), ([128, 128, 128], [0, 128, 128]), ([7], [0]), ([400], [0])])
def test_the_blocks_of_a_mask_hold_every_pair_that_attends(own: list[int], shared: list[int], window: int) -> None:
    tree, _ = grow_tree(own, shared, torch.device("cpu"))
    found, at = block_mask(tree, window), torch.arange(sum(own))
    seen = tree.mask(window)(None, None, at[:, None], at)
    partial, whole = (
        [set(row[:count]) for row, count in zip(indices[0, 0].tolist(), counts[0, 0].tolist(), strict=True)]
        for counts, indices in (
            (found.kv_num_blocks, found.kv_indices),
            (found.full_kv_num_blocks, found.full_kv_indices),
        )
    )
    for number, rows in enumerate(seen.split(MASK_BLOCK)):
        blocks = rows.split(MASK_BLOCK, 1)
        assert {key for key, block in enumerate(blocks) if block.any()} <= partial[number] | whole[number]
        assert all(blocks[key].all() and blocks[key].size(1) == MASK_BLOCK for key in whole[number])
        assert not partial[number] & whole[number]
    if len(own) == 1 and not window:
        assert [len(one) for one in whole] == list(range(len(whole))), "causal blocks below the diagonal are whole"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each("window", [None, (3, 0)])
def test_flex_attention_and_its_gradients_on_a_device(window: tuple[int, int] | None) -> None:
    kernel = tree_kernel("cuda", torch.float32, 16, 16)
    assert kernel is not None
    for own, shared in ((OWN, SHARED), ([600, 600], [0, 550])):
        found, wanted = (attended(own, shared, window, one, "cuda") for one in (kernel, by_mask))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


def test_without_a_device_there_is_no_flex_attention() -> None:
    assert tree_kernel("cpu", torch.float32, 16, 16) is None


def test_places_are_those_of_a_tree_in_depth_first_order() -> None:
    tree, places = grow_tree(OWN, SHARED, torch.device("cpu"))
    paths = [path.tolist() for path in places.split([x + y for x, y in zip(OWN, SHARED, strict=True)])]
    assert paths == [
        [*range(9)],
        [*range(7), 9, 10, 11, 12],
        [0, 1, 2, 3, 4],
        [0, 1, *range(13, 19)],
        [19, 20, 21],
    ]  # 7 + 4 tokens; then 5 of those; then 2 and 6 of its own
    assert all(tree.depths[path].tolist() == list(range(len(path))) for path in paths)
    assert tree.ends[torch.tensor([0, 2, 5, 8, 12, 18, 21])].tolist() == [19, 13, 13, 9, 13, 19, 22]


def test_paths_are_not_kept_for_the_gradient() -> None:
    """Sixty rows behind one prefix would keep its keys and values sixty times: 8 MB."""
    own, shared = [512] + [4] * 60, [0] + [500] * 60
    tree, _ = grow_tree(own, shared, torch.device("cpu"))
    made = [torch.randn(sum(own), heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    one, packing = attention(), PackedRows((0, sum(own)), "cpu", tree)

    def peak(work: Callable[[], Any]) -> tuple[Any, int]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            found = work()
        events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        ordered = sorted(events, key=lambda event: event.start_ns())
        return found, max(itertools.accumulate(event.nbytes() for event in ordered))

    found, forward = peak(lambda: one(*made, None, packed_seq_params=packing))
    _, backward = peak(lambda: torch.autograd.grad(found.sum(), made))
    assert max(forward, backward) < 2 << 20
