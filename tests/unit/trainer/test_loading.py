"""Loading of a model folder: its files are mapped, and are never copied as a whole on the way to a rank's part."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.each import each
from tests.reference.parity import nontrivial_weights
from tests.reference.small_models import SMALL
from turnlog.trainer import mcore, weights
from turnlog.trainer.export import export_weights
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.network import build_model, model_config
from turnlog.trainer.plan import LearnerOptions

ONE = LearnerOptions(threads=1)
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def anonymous() -> int:
    """Return the bytes of this process that no file holds."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def test_tensors_that_are_read_stay_in_the_pages_of_their_files(tmp_path: Path) -> None:
    names = {f"{name}.weight": torch.full((8, MIB), float(name)) for name in range(3)}
    weights.write_tensors(tmp_path, names, shard_bytes=40 * MIB)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    del names
    before = anonymous()
    state = weights.read_weights(tmp_path)
    assert [float(tensor.sum()) for _, tensor in sorted(state.items())] == [0.0, 8.0 * MIB, 16.0 * MIB]
    assert anonymous() - before < 16 * MIB
    assert sum(tensor.nbytes for tensor in state.values()) == 96 * MIB


def peak(work: Callable[[], object]) -> int:
    """Return the most bytes that torch holds during `work` beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events: Any = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    ordered = sorted(events, key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in ordered), default=0)


def apart(state: Mapping[str, torch.Tensor], shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return tensors of Qwen3.5 with one per expert and matrix, as transformers writes them."""
    found = dict(state)
    for name in state:
        layer, stacked, which = name.partition(".mlp.experts.")
        if stacked and shape.mixture and "proj" in which and state[name].dim() == 3:
            tensor = found.pop(name)
            for expert, values in enumerate(tensor):
                parts = (
                    {"down": values}
                    if which == "down_proj"
                    else dict(zip(("gate", "up"), values.chunk(2), strict=True))
                )
                found |= {f"{layer}{stacked}{expert}.{part}_proj.weight": one for part, one in parts.items()}
    return found


CASES = {
    **SMALL,
    "rows added to the vocabulary": dataclasses.replace(SMALL["qwen3"], vocabulary=381),
}


@each("shape", CASES.values(), ids=CASES)
def test_a_model_is_copied_tensor_by_tensor_on_the_way_to_a_rank(shape: ModelShape) -> None:
    state = nontrivial_weights(shape, 1)
    folders = [state, apart(state, shape)] if shape.kind.startswith("qwen3_5_moe") else [state]
    options = dataclasses.replace(ONE, vocabulary_multiple=64 if shape.vocabulary == 381 else 1)
    for folder in folders:
        with mcore.quiet():
            model = build_model(shape, model_config(shape, options), options)
        sizes = [tensor.nbytes for tensor in model.parameters()]
        largest = max(tensor.nbytes for name, tensor in state.items() if "experts" not in name)
        assert sum(sizes) > 4 * largest
        assert peak(functools.partial(weights.load_weights, model, folder, shape)) < 1.5 * largest
        assert export_weights(model, shape).keys() == state.keys()


def test_a_quantized_expert_is_unpacked_as_it_is_taken() -> None:
    shape = SMALL["gpt_oss"]
    state = nontrivial_weights(shape, 1)
    for name in [name for name in state if name.endswith("_proj") and ".experts." in name]:
        experts, columns, rows = state.pop(name).shape
        state[f"{name}_blocks"] = torch.zeros((experts, rows, columns // 32, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.full((experts, rows, columns // 32), 127, dtype=torch.uint8)
    with mcore.quiet():
        model = build_model(shape, model_config(shape, ONE), ONE)
    expert = 4 * 2 * shape.ffn * shape.hidden
    # Its values as float32, as int32 that pick them, and both forms of their parts.
    assert peak(lambda: weights.load_weights(model, state, shape)) < 6 * expert
