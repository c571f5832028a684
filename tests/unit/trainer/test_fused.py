"""Fused elementwise work gives the numbers of Megatron's own, in fewer passes, and survives a compiler that fails."""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.batches import synthetic_rows
from turnlog.trainer import mcore
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.models import fused, output
from turnlog.trainer.network import model_config
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.warm_start import random_weights

OBJECTIVE = PolicyGradient(0.2, 0.2)
SIZE = 16
ROPE = "megatron.core.models.common.embeddings.rope_utils"


def by_megatron(x: torch.Tensor, angles: torch.Tensor, factor: float = 1.0, **named: Any) -> torch.Tensor:
    """Rotate [s, b, n, d] by angles; the options are Megatron's."""
    with mcore.quiet():
        config = replace(model_config(TINY, LearnerOptions()), **named)
    found: torch.Tensor = importlib.import_module(ROPE).apply_rotary_pos_emb(x, angles, config, mscale=factor)
    return found


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def assert_same(found: Any, wanted: Any, inputs: list[torch.Tensor]) -> None:
    """Values and gradients are the same to 1e-6 of their magnitude."""
    weights = [torch.randn_like(one) for one in wanted]
    gradients = []
    for each in (found, wanted):
        total = torch.stack([(one * weight).sum() for one, weight in zip(each, weights, strict=True)]).sum()
        gradients.append(torch.autograd.grad(total, inputs))
    for mine, theirs in zip([*found, *gradients[0]], [*wanted, *gradients[1]], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6 * max(1.0, float(theirs.detach().abs().max())))


@pytest.mark.parametrize(
    ("rows", "rotated", "norms", "gated"),
    [(1, SIZE, True, False), (2, SIZE, True, False), (2, 4, True, True), (2, SIZE, False, False), (1, 4, False, True)],
)
def test_heads_are_those_of_megatron(rows: int, rotated: int, norms: bool, gated: bool) -> None:
    torch.manual_seed(0)
    each, groups = 3, 2
    mixed = torch.randn(12, rows, groups, each * (1 + gated) + 2, SIZE, requires_grad=True)
    scales = [torch.rand(SIZE).requires_grad_() for _ in range(2 * norms)]
    half = torch.randn(12, 1, 1, rotated // 2)
    angles = torch.cat([half, half], -1)
    rules = fused.HeadRules(each, gated, offset=1.0)
    found = fused.heads(mixed, fused.rotary_table(angles, 1.5), *(scales or (None, None)), rules)
    query, *gate, key, value = torch.split(mixed, [each] * (1 + gated) + [1, 1], 3)
    turned = []
    for x, scale in itertools.zip_longest((query, key), scales):
        normal = x if scale is None else functional.rms_norm(x, (SIZE,), 1 + scale, 1e-6)
        turned.append(by_megatron(normal.flatten(2, 3), angles, 1.5))
    assert_same(found, [*turned, value.flatten(2, 3), *(one.flatten(2, 3) for one in gate)], [mixed, *scales])


def test_rotation_and_swiglu_and_norms_are_those_of_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3, SIZE, requires_grad=True)
    half = torch.randn(5, 1, 1, 4)
    angles = torch.cat([half, half], -1)
    assert_same([fused.rotate(x, fused.rotary_table(angles))], [by_megatron(x, angles)], [x])
    neighbours = half.repeat_interleave(2, -1)
    found = fused.rotate(x, fused.rotary_table(neighbours, interleaved=True), interleaved=True)
    assert_same([found], [by_megatron(x, neighbours, rotary_interleaved=True)], [x])
    gate, up = x.chunk(2, -1)
    assert_same([fused.swiglu(x)], [functional.silu(gate) * up], [x])
    scale = torch.rand(SIZE, requires_grad=True)
    wanted = functional.rms_norm(x, (SIZE,), 1 + scale, 1e-5)
    assert_same([fused.norm_around_zero(x, scale, 1e-5)], [wanted], [x, scale])


@pytest.mark.parametrize("packing", ["on", "off"])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_steps_are_the_same_without_fusion(packing: str, qk_norm: bool) -> None:
    shape = replace(TINY, qk_norm=qk_norm, kind="qwen3" if qk_norm else "llama")
    rows, both = synthetic_rows(1, rows=6), []
    for on in (True, False):
        options = LearnerOptions(packing=packing, fused=on, microbatch_tokens=100)
        learner = Learner(shape, random_weights(shape, 1), options)
        steps = [learner.step(rows, OBJECTIVE, 1e-3) for _ in range(2)]
        both.append([number for one in steps for number in (one.loss, one.grad_norm, one.entropy)])
    assert both[0] == pytest.approx(both[1], rel=1e-5, abs=1e-6)


def test_swiglu_keeps_its_input_alone() -> None:
    kept = list[torch.Tensor]()
    x = torch.randn(5, SIZE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        fused.swiglu(x).sum()
    assert [one.shape for one in kept] == [x.shape]
    assert kept[0].data_ptr() == x.data_ptr()


class Launches(TorchDispatchMode):
    """Number of kernels that a block would launch on CUDA, where a call of a `Compiled` is one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._calls = set[FrameType]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not fused.Compiled.__call__.__code__:
            frame = frame.f_back
        if frame is not None:
            self._calls.add(frame)
        elif not func.is_view and not func.__name__.startswith(("empty", "detach", "_unsafe_view")):
            self.count += 1
        return found

    @property
    def total(self) -> int:
        return self.count + len(self._calls)


@pytest.mark.parametrize("packing", ["on", "off"])
def test_a_fused_layer_launches_few_kernels(packing: str) -> None:
    """Forward, backward and the sum of its gradients, as the difference of two depths."""
    per_layer = []
    for on in (False, True):
        totals = []
        for layers in (1, 2):
            shape = replace(TINY, layers=layers)
            learner = Learner(shape, random_weights(shape, 1), LearnerOptions(packing=packing, fused=on))
            with Launches() as launches:
                learner.step(synthetic_rows(1, rows=2), OBJECTIVE, 0.0)
            totals.append(launches.total)
        per_layer.append(totals[1] - totals[0])
    print(packing, per_layer)
    assert per_layer[1] <= per_layer[0] - 30


def token_arguments(name: str, tokens: int) -> tuple[list[torch.Tensor | None], dict[str, Any]]:
    """Arguments of a compiled function for a number of tokens."""
    torch.manual_seed(0)
    mixed, table, scale = torch.randn(tokens, 2, 4, SIZE), torch.randn(tokens, 1, 1, 2 * SIZE), torch.rand(SIZE)
    numbers = {"each": 2, "epsilon": 1e-6, "offset": 0.0}
    column = torch.rand(tokens, 1)
    own, slopes = torch.ones(tokens, 1, dtype=torch.int64), [torch.randn(tokens, 2, n, SIZE) for n in (2, 1, 1)]
    made: dict[str, tuple[list[torch.Tensor | None], dict[str, Any]]] = {
        "make_heads": ([mixed, table, scale, None], numbers),
        "heads_slopes": ([mixed, table, scale, scale, *slopes], {**numbers, "to_scales": True}),
        "rotate_forward": ([mixed[:, 0], table[:, 0]], {"interleaved": False}),
        "rotate_backward": ([mixed[:, 0], table[:, 0]], {"interleaved": True}),
        "swiglu_forward": ([mixed.flatten(1)], {}),
        "swiglu_backward": ([mixed[:, 0].flatten(1), mixed.flatten(1)], {}),
        "norm_forward": ([mixed[:, 0, 0], scale], {"epsilon": 1e-6, "offset": 1.0}),
        "norm_backward": ([mixed[:, 0, 0], mixed[:, 0, 1], scale], {"epsilon": 1e-6, "offset": 1.0, "to_scale": True}),
        "softmax_sums": ([mixed[:, 0].flatten(1), own, 1 + column], {"padding": 3, "entropy": True}),
        "logit_slopes": (
            [mixed[:, 0].flatten(1), own, own > 0, 1 + column, column, column, column, column],
            {"padding": 3},
        ),
    }
    return made[name]


COMPILED = {
    name: one for module in (fused, output) for name, one in vars(module).items() if isinstance(one, fused.Compiled)
}


@pytest.mark.parametrize("name", sorted(COMPILED))
def test_one_translation_without_a_break_serves_any_number_of_tokens(name: str) -> None:
    graphs = list[Any]()

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    own = fused.Compiled(COMPILED[name].function, backend)
    for tokens in (5, 9, 6):
        arguments, constants = token_arguments(name, tokens)
        copies = [None if one is None else one.clone() for one in arguments]
        with torch.no_grad():
            found = own(*arguments, compiled=True, **constants)
            wanted = COMPILED[name](*copies, compiled=False, **constants)
        torch.testing.assert_close(found, wanted)
    assert len(graphs) == 1
    assert not own.failed


def test_a_function_that_does_not_compile_runs_as_written_after_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler here")

    own = fused.Compiled(lambda x: x + 1, fail)
    with caplog.at_level(logging.WARNING):
        assert [float(own(torch.ones(1), compiled=True)) for _ in range(3)] == [2.0] * 3
    assert own.failed
    (record,) = caplog.records
    assert "trainer.compiled" in record.getMessage()


def test_what_is_compiled_follows_device_and_setting() -> None:
    assert fused.compiled_parts("auto", "cuda") == set(fused.NAMES)
    assert fused.compiled_parts("auto", "cpu") == fused.compiled_parts("off", "cuda") == set()
    assert fused.compiled_parts("swiglu,logprobs", "cpu") == {"swiglu", "logprobs"}
    with pytest.raises(ValueError, match="must be auto, off"):
        fused.compiled_parts("all", "cuda")
