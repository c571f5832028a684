"""Forward and backward passes ask the device for nothing: the host would wait for each number until all before it was
computed.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.batches import branched_rows, synthetic_rows
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.algorithms.objective import ForwardPassResults
from turnlog.trainer.algorithms.tokens import BUILT_IN, CriticRules
from turnlog.trainer.families.shape import TINY, TINY_HYBRID, ModelShape, SlidingWindow
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.warm_start import random_weights

METHODS = frozenset(("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__",
                     "__array__", "__contains__"))  # fmt: skip
"""Methods of a tensor that give the host its numbers; they reach no operator for a tensor of the CPU."""
OPERATORS = frozenset(("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2",
                       "repeat_interleave", "item"))  # fmt: skip
"""Operators whose result is on the host, or whose size depends on numbers of the device."""
SCHEDULE = "forward_backward_no_pipelining"
BESIDE = ("finalize_model_grads", "get_emb")
"""Functions within the schedule that read nothing between passes: the former runs after them, once a step; the latter
moves rotary frequencies to the device, which is the host here."""


class HostReads:
    """Where a block of code reads tensors on the host within Megatron's schedule of forward and backward passes."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.passes = 0
        self._function, self._dispatch = _Functions(self), _Dispatch(self)

    def __enter__(self) -> HostReads:
        self._function.__enter__(), self._dispatch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._dispatch.__exit__(*error), self._function.__exit__(*error)

    def note(self, name: str) -> None:
        """Keep the place of a read if the schedule is running and its backward passes are not over."""
        stack = traceback.extract_stack()[:-2]  # without the modes here
        names = [frame.name for frame in stack]
        if SCHEDULE in names and not any(name in names for name in BESIDE):
            last = [frame for frame in stack if "/torch/" not in frame.filename][-1]
            self.places.append(f"{name} at {last.filename}:{last.lineno}")


class _Functions(TorchFunctionMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        to_host = name == "to" and any(str(one) == "cpu" for one in (*args[1:], *(kwargs or {}).values()))
        if name in METHODS or to_host:
            self._reads.note(name)
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._reads.passes += 1
        name, named = func.__name__.split(".")[0], kwargs or {}
        if name == "repeat_interleave" and named.get("output_size") is not None:
            return func(*args, **named)
        masks = [one for one in args[1] if one is not None] if name in ("index", "index_put", "index_put_") else []
        if name in OPERATORS or any(one.dtype in (torch.bool, torch.uint8) for one in masks):
            self._reads.note(name)
        return func(*args, **named)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


PLAIN = PolicyGradient(0.2, 0.2)
WINDOWS = replace(
    TINY, kind="mistral", sliding=SlidingWindow(size=8), layer_types=("sliding_attention",) * 2, qk_norm=False
)


def of_layout(layout: str, rows: BatchRows) -> tuple[BatchRows, LearnerOptions]:
    """Return rows that are packed, padded or, sharing prefixes, a tree, and the options for that."""
    if layout == "tree":
        return branched_rows(rows, 0), LearnerOptions(microbatch_tokens=200)
    return rows, LearnerOptions(packing={"packed": "on", "padded": "off"}[layout], microbatch_tokens=60)


@pytest.mark.parametrize("layout", ["packed", "padded", "tree"])
@pytest.mark.parametrize(
    ("shape", "options", "objective"),
    [
        (TINY, {}, PLAIN),
        (TINY, {"fused": False}, PLAIN),
        (TINY, {"recompute": "full"}, PLAIN),
        (TINY, {"lora_rank": 4}, PLAIN),
        (WINDOWS, {}, PLAIN),
        (TINY_HYBRID, {}, PLAIN),
        (TINY, {}, PolicyGradient(0.2, 0.2, entropy_coefficient=0.01, importance="truncated")),
        (TINY, {}, PolicyGradient(0.2, 0.2, dual_clip=3.0, algorithm=BUILT_IN["gspo"], kl="k3", kl_coefficient=0.1)),
    ],
    ids=["plain", "unfused", "recompute", "adapters", "windows", "delta", "entropy", "reference"],
)
def test_a_step_reads_nothing_of_the_device_before_its_passes_are_over(
    layout: str, shape: ModelShape, options: dict[str, Any], objective: PolicyGradient
) -> None:
    weights = random_weights(shape, 1)
    rows, its_options = of_layout(layout, synthetic_rows(0, rows=6, vocabulary=shape.vocabulary))
    learner = Learner(shape, weights, replace(its_options, **options), reference=weights)
    with HostReads() as reads:
        numbers = ForwardPassResults(reference=learner.reference_logprobs(rows) if objective.kl != "none" else None)
        found = learner.step(rows, objective, 1e-3, numbers, tell_tokens=True, held=0)
    assert reads.places == []
    assert reads.passes > 100
    assert not found.skipped


@pytest.mark.parametrize("layout", ["packed", "padded", "tree"])
def test_a_critic_reads_nothing_of_the_device_before_its_passes_are_over(layout: str) -> None:
    weights, (rows, options) = random_weights(TINY, 1), of_layout(layout, synthetic_rows(0, rows=6))
    objective = PolicyGradient(0.2, 0.2, algorithm=BUILT_IN["ppo"], critic=CriticRules(rate=1e-3))
    learner = Learner(TINY, weights, options, critic=True)
    with HostReads() as reads:
        learner.step(rows, objective, 1e-3, ForwardPassResults(values=learner.values(rows)))
    assert reads.places == []


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: float(x.sum()),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.repeat_interleave(x, torch.ones(3, dtype=torch.int64)),
        lambda x: 1.0 in x,
        lambda x: x.numpy(),
    ],
)
def test_each_way_to_read_is_seen(read: Any) -> None:
    def forward_backward_no_pipelining() -> None:
        read(torch.ones(3))

    with HostReads() as reads:
        forward_backward_no_pipelining()
    assert reads.places
