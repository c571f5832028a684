"""Grouped experts: the numbers of Megatron's sequential ones, in launches that their number does not change."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.each import each
from tests.fakes.batches import synthetic_rows
from tests.reference.parity import check_export, loaded_model, nontrivial_weights
from tests.reference.small_models import SMALL
from turnlog.trainer import mcore
from turnlog.trainer.checkpoints.state import Save, read_common
from turnlog.trainer.families.family import as_dict
from turnlog.trainer.families.shape import TINY_MIXTURE, ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.models.mixture import GroupedExperts, grouped_product, one_by_one
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.warm_start import random_weights
from turnlog.trainer.weights import unstack

MIXTURES = {kind: shape for kind, shape in SMALL.items() if shape.mixture}
GROUPED, SEQUENTIAL = LearnerOptions(threads=1), LearnerOptions(threads=1, experts="sequential")
OBJECTIVE = PolicyGradient(0.2, 0.2)
TOKENS = torch.randint(0, 83, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def logprobs(model: Any) -> torch.Tensor:
    """Return the model's log-probs over the vocabulary."""
    places = torch.arange(TOKENS.size(1)).expand(len(TOKENS), -1)
    with mcore.quiet():
        found: torch.Tensor = model(TOKENS, places, None).float().log_softmax(-1)
    return found


def gradients(model: Any, found: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of a weighted sum of log-probs, by Megatron's names of sequential experts."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    loss = (found * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum()
    pairs = zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True)
    return dict(piece for name, gradient in pairs for piece in unstack(name, gradient))


@each("shape", MIXTURES.values(), ids=MIXTURES)
def test_log_probs_and_gradients_are_those_of_sequential_experts(shape: ModelShape) -> None:
    state = nontrivial_weights(shape, 3)
    grouped, sequential = (loaded_model(shape, state, options) for options in (GROUPED, SEQUENTIAL))
    assert any(isinstance(module, GroupedExperts) for module in grouped.modules())
    assert not any(isinstance(module, GroupedExperts) for module in sequential.modules())
    check_export(grouped, shape, state)
    ours, theirs = logprobs(grouped), logprobs(sequential)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    found, wanted = gradients(grouped, ours), gradients(sequential, theirs)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name)


@each("shape", MIXTURES.values(), ids=MIXTURES)
def test_steps_are_those_of_sequential_experts_in_bfloat16_too(shape: ModelShape) -> None:
    for dtype, near in (("float32", 1e-5), ("bfloat16", 0.03)):
        weights = random_weights(shape, 1)
        one, other = (
            Learner(shape, weights, dataclasses.replace(options, dtype=dtype)) for options in (GROUPED, SEQUENTIAL)
        )
        found, wanted = (each.step(synthetic_rows(0), OBJECTIVE, 1e-3) for each in (one, other))
        assert found.loss == pytest.approx(wanted.loss, rel=near, abs=near)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=near)
        one.policy.release()
        other.policy.release()


class Launches(TorchDispatchMode):
    """Count of the operators that a block of code dispatches, without views, which launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def layer_of(shape: ModelShape, options: LearnerOptions, dtype: str) -> tuple[Any, torch.Tensor]:
    """Return the last layer's mixture, and an input [s, b, h]."""
    model = loaded_model(shape, random_weights(shape, 1), dataclasses.replace(options, dtype=dtype))
    size = (TOKENS.size(1), len(TOKENS), shape.hidden)
    return model.decoder.layers[-1].mlp, torch.randn(size).to(model.config.params_dtype).requires_grad_()


def launches(kind: str, experts: int, options: LearnerOptions, dtype: str) -> Counter[str]:
    """Return what a mixture's forward and backward pass launches."""
    shape = MIXTURES[kind]
    assert shape.mixture is not None
    shape = dataclasses.replace(shape, mixture=dataclasses.replace(shape.mixture, experts=experts))
    layer, hidden = layer_of(shape, options, dtype)
    trained = [one for one in layer.parameters() if one.requires_grad]
    with mcore.quiet(), Launches() as seen:
        torch.autograd.grad(layer(hidden)[0].sum(), (hidden, *trained))
    counts: Counter[str] = seen.counts
    return counts


@each("kind", MIXTURES)
def test_launches_do_not_depend_on_the_number_of_experts(kind: str) -> None:
    for dtype in ("float32", "bfloat16"):
        few, many = (launches(kind, experts, GROUPED, dtype) for experts in (8, 32))
        assert few == many
        assert few["aten._grouped_mm.default"] == 6
        assert launches(kind, 32, SEQUENTIAL, dtype).total() > launches(kind, 8, SEQUENTIAL, dtype).total() + 24 * 15


@each("shape", MIXTURES.values(), ids=MIXTURES)
def test_a_layer_without_expert_parallelism_reads_nothing_on_the_host(shape: ModelShape) -> None:
    # Tensors of the device "meta" have no values: whoever reads one, or asks how many are not 0, fails.
    (grouped, hidden), (sequential, _) = (layer_of(shape, options, "bfloat16") for options in (GROUPED, SEQUENTIAL))
    hidden = hidden.detach().to("meta").requires_grad_()
    with mcore.quiet():
        found, bias = grouped.to("meta")(hidden)
        assert found.shape == hidden.shape
        assert bias is None
        found.sum().backward()
        assert hidden.grad is not None
        with pytest.raises(RuntimeError):
            sequential.to("meta")(hidden)


@each("columns", [16, 18])
def test_a_product_whose_sizes_torch_refuses_is_taken_group_by_group(columns: int) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, weights = (torch.randn(size, generator=draw, requires_grad=True) for size in ((9, columns), (4, 8, columns)))
    ends = torch.tensor([2, 2, 9, 9], dtype=torch.int32)
    found, wanted = grouped_product(rows, weights, ends), one_by_one(rows, weights, ends)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(wanted[2:], rows[2:] @ weights[2].T)
    for one, other in zip(
        *(torch.autograd.grad(some.square().sum(), (rows, weights)) for some in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other)
        assert torch.isfinite(one).all()


def test_experts_without_a_token_have_a_gradient_of_zero() -> None:
    weights = torch.randn(3, 8, 16, requires_grad=True)
    found = grouped_product(torch.zeros(0, 16), weights, torch.zeros(3, dtype=torch.int32))
    assert found.shape == (0, 8)
    (gradient,) = torch.autograd.grad(found.sum(), weights)
    assert not gradient.any()


@each(
    ("reshardable", "shape", "lora"),
    [(True, TINY_MIXTURE, 0), (False, TINY_MIXTURE, 0), (False, SMALL["gpt_oss"], 0), (True, TINY_MIXTURE, 4)],
)
def test_checkpoints_of_sequential_experts_load(
    tmp_path: Path, reshardable: bool, shape: ModelShape, lora: int
) -> None:
    folder = tmp_path / f"{reshardable}-{shape.kind}-{lora}"
    folder.mkdir()
    ours, theirs = (dataclasses.replace(options, lora_rank=lora) for options in (SEQUENTIAL, GROUPED))
    learner = Learner(shape, random_weights(shape, 1), ours)
    learner.step(synthetic_rows(0), OBJECTIVE, 1e-3)
    said = as_dict(shape) | ({"lora_rank": lora, "lora_alpha": ours.lora_alpha} if lora else {})
    Save(*learner.states(), folder, {"shape": said}, reshardable=reshardable).finish(wait=True)
    assert read_common(folder).pop("experts") == "single"
    mcore.rewrite_common(folder, {key: value for key, value in read_common(folder).items() if key != "experts"})
    other = Learner(shape, random_weights(shape, 1 if lora else 9), theirs)
    other.restore(folder)
    saved = learner.export()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in other.export().items())
    found, wanted = (each.step(synthetic_rows(1), OBJECTIVE, 1e-3) for each in (other, learner))
    assert found.loss == pytest.approx(wanted.loss, abs=1e-6)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    after = learner.export()
    assert max(float((tensor - after[name]).abs().max()) for name, tensor in other.export().items()) < 1e-5
