"""Settings of [trainer] that Megatron acts on: what they change in its model, its gradients and its optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.each import each
from tests.fakes.batches import synthetic_rows
from tests.reference.small_models import GEMMA3, LATENT, SMALL
from turnlog.settings import SettingsError, from_tables
from turnlog.trainer import LayoutUnfit
from turnlog.trainer.families.shape import TINY, TINY_HYBRID_MIXTURE, TINY_MIXTURE, TINY_VISION, ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.layouts import check_layout
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, PolicyGradient, learning_plan
from turnlog.trainer.warm_start import random_weights

OBJECTIVE = PolicyGradient(0.2, 0.2)
ONE = LearnerOptions(threads=1)
MODULES = ("core_attn", "mlp", "moe", "shared_experts")


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def steps(learner: Learner, first: int = 0, last: int = 2) -> list[tuple[float, float]]:
    """Take steps and return (loss, gradient norm) of each."""
    shape = learner.shape
    found = [
        learner.step(synthetic_rows(step, vocabulary=shape.vocabulary), OBJECTIVE, 1e-3) for step in range(first, last)
    ]
    return [(one.loss, one.grad_norm) for one in found]


def learner(shape: ModelShape = TINY, seed: int = 1, **changes: Any) -> Learner:
    return Learner(shape, random_weights(shape, seed), dataclasses.replace(ONE, **changes))


def same(one: Learner, other: Learner) -> bool:
    """Whether two learners export the same bits."""
    exported = other.export()
    return all(torch.equal(tensor, exported[name]) for name, tensor in one.export().items())


@each(
    ("shape", "modules"),
    [
        (TINY, ("core_attn",)), (TINY, ("core_attn", "mlp")), (TINY_MIXTURE, ("moe",)), (LATENT, ("mlp", "moe")),
        (LATENT, ("shared_experts",)),
        (GEMMA3, ("mlp",)), (TINY_HYBRID_MIXTURE, ("core_attn", "moe")),
    ],
)  # fmt: skip
def test_recomputing_some_modules_changes_no_bit(shape: ModelShape, modules: tuple[str, ...]) -> None:
    plain, again = learner(shape), learner(shape, recompute="selective", recompute_modules=modules)
    assert steps(plain) == steps(again)
    assert same(plain, again)


@each(
    ("shape", "possible"),
    [(TINY, {"core_attn", "mlp"}), (LATENT, {"mlp", "moe", "shared_experts"}), (TINY_MIXTURE, {"core_attn", "moe"})],
)
def test_a_module_that_nothing_would_recompute_is_refused_by_name(shape: ModelShape, possible: set[str]) -> None:
    for module in MODULES:
        options = dataclasses.replace(ONE, recompute="selective", recompute_modules=(module,))
        if module in possible:
            check_layout(shape, options)
            continue
        with pytest.raises(LayoutUnfit, match=f"recompute_modules has {module}, which recomputes nothing"):
            check_layout(shape, options)


def test_gradients_in_bfloat16_are_summed_in_bfloat16() -> None:
    wide, narrow = (learner(dtype="bfloat16", grad_reduce_in_fp32=wide) for wide in (True, False))
    assert {buffer.grad_dtype for buffer in wide.policy._wrapped.buffers} == {torch.float32}
    assert {buffer.grad_dtype for buffer in narrow.policy._wrapped.buffers} == {torch.bfloat16}
    for (loss, norm), (other, rounded) in zip(steps(wide), steps(narrow), strict=True):
        assert other == pytest.approx(loss, abs=2e-2)
        assert rounded == pytest.approx(norm, rel=1e-2)
        assert rounded != norm


class Collectives(TorchDispatchMode):
    """Collective operations on buffers, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [kind for kind in ("reduce_scatter", "allgather") if kind in str(func)]
        return func(*args, **(kwargs or {}))


def collectives(work: Callable[[], object]) -> list[str]:
    found = Collectives()
    with found:
        work()
    return found.seen


def test_gradients_are_summed_once_a_step_and_weights_gathered_by_what_reads_them_next() -> None:
    many: dict[str, Any] = {"microbatch_tokens": 100}
    plain, overlapped = learner(**many), learner(**many, overlap_grad_reduce=True, overlap_param_gather=True)
    assert collectives(lambda: steps(plain, 0, 1)) == ["reduce_scatter", "allgather"]
    assert collectives(lambda: steps(overlapped, 0, 1)) == ["allgather", "reduce_scatter"]
    assert collectives(lambda: steps(overlapped, 1, 2)) == ["allgather", "reduce_scatter"]
    assert "allgather" in collectives(overlapped.plan_export)  # and ranks tell each other what they hold
    assert collectives(overlapped.plan_export) == []
    overlapped.export()
    steps(plain, 1, 2)
    assert same(plain, overlapped)


@each("shape", [TINY, TINY_MIXTURE, TINY_HYBRID_MIXTURE, LATENT, GEMMA3])
def test_every_module_whose_weights_are_read_is_called_so_that_its_hook_waits_for_them(shape: ModelShape) -> None:
    one, called = learner(shape), set[str]()
    for name, module in one.policy.model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    steps(one, 0, 1)
    trained = {name for name, parameter in one.policy.model.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[0] for name in trained} == called


class TwoDevices(TorchFunctionMode):
    """Mode in which tensors lie on a GPU unless `tensor.cpu()` made them, so that Megatron's optimizer of two devices
    does its work here: without it, it takes every tensor for one that it need not copy, and then misses the copies.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not getattr(args[0], "on_host", False)
        if func is torch.Tensor.pin_memory:
            return args[0]
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu:
            found = found.clone()
            found.on_host = True
        elif func in (torch.Tensor.float, torch.Tensor.clone, torch.Tensor.detach):
            found.on_host = getattr(args[0], "on_host", False)
        return found


@each(("shape", "fraction", "reshardable"), [(TINY, 1.0, True), (TINY, 0.5, False), (TINY_MIXTURE, 0.5, True)])
def test_an_optimizer_in_host_memory_takes_the_same_steps_and_continues_from_its_checkpoint(
    tmp_path: Path, shape: ModelShape, fraction: float, reshardable: bool
) -> None:
    folder = tmp_path / f"{shape.kind}-{fraction}"
    folder.mkdir()
    plain = learner(shape, dtype="bfloat16")
    offloaded: dict[str, Any] = {
        "dtype": "bfloat16", "optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction,
        "reshardable": reshardable,
    }  # fmt: skip
    with TwoDevices():
        one = learner(shape, **offloaded)
        (optimizer,) = (each.optimizer for each in one.policy.optimizer.chained_optimizers)
        on_host, on_device = (
            sum(
                parameter.numel() for each in optimizers for group in each.param_groups for parameter in group["params"]
            )
            for optimizers in (optimizer.cpu_optimizers, [optimizer.gpu_optimizer] if optimizer.gpu_optimizer else [])
        )
        assert on_host / (on_host + on_device) >= fraction
        assert (on_device > 0) == (fraction < 1)
        assert steps(one) == steps(plain)
        one.save(folder, {})
        other = learner(shape, 7, **offloaded)
        other.restore(folder)
        assert steps(one, 2, 3) == steps(other, 2, 3) == steps(plain, 2, 3)
        assert same(one, plain)
        assert same(one, other)


@each(("shape", "dtype"), [(TINY, "float32"), (SMALL["qwen3_5_text"], "bfloat16")])
def test_an_optimizer_of_float32_weights_is_not_offloaded(shape: ModelShape, dtype: str) -> None:
    with pytest.raises(LayoutUnfit, match=r"optimizer_cpu_offload is not supported for .*float32"):
        check_layout(shape, dataclasses.replace(ONE, dtype=dtype, optimizer_cpu_offload=True))


def test_overlap_is_refused_for_a_model_part_of_which_may_have_no_gradient() -> None:
    with pytest.raises(LayoutUnfit, match="overlap_grad_reduce is not supported for qwen2_5_vl"):
        check_layout(TINY_VISION, dataclasses.replace(ONE, overlap_grad_reduce=True))


@each(
    ("trainer", "said"),
    [
        ({"overlap_param_gather": True}, "overlap_param_gather needs trainer.overlap_grad_reduce"),
        ({"recompute": "selective", "recompute_modules": []}, "needs trainer.recompute_modules"),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload needs a GPU"),
        ({"use_precision_aware_optimizer": True}, r"pip install transformer_engine\[pytorch\]"),
    ],
)
def test_settings_that_need_something_else_are_refused_by_what_they_need(trainer: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        learning_plan(from_tables({"trainer": trainer}, {}, source="test"), cuda=False)


def test_settings_reach_the_learner() -> None:
    trainer = {
        "recompute": "selective", "recompute_modules": ["mlp", "core_attn"], "grad_reduce_in_fp32": False,
        "overlap_grad_reduce": True, "overlap_param_gather": True, "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.25, "device_memory_gb": 80.0,
    }  # fmt: skip
    plan = learning_plan(from_tables({"trainer": trainer}, {}, source="test"), cuda=True)
    wanted = {**trainer, "recompute_modules": ("mlp", "core_attn")}
    assert plan.device_memory_gb == wanted.pop("device_memory_gb")
    assert {name: getattr(plan.options, name) for name in wanted} == wanted
    assert plan.recorded.keys() & wanted.keys() == {"grad_reduce_in_fp32"}
