"""Log-probs and entropy by chunks: values, gradients and memory are those that the definitions ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from turnlog.trainer.launch import process_group
from turnlog.trainer.models.output import chunk_rows, logprobs_and_entropy

TOKENS, HIDDEN, COLUMNS, VOCABULARY = 37, 16, 96, 83


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    with process_group():
        yield


def inputs(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, HIDDEN, generator=draw).div(2).to(dtype) for size in (tokens, COLUMNS))
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=draw)
    temperature = torch.rand(tokens, generator=draw) + 0.5
    return hidden.requires_grad_(), weight.requires_grad_(), targets, temperature


def by_definition(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden @ weight.T).float()[:, :VOCABULARY] / temperature[:, None]
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def gradients(found: tuple[torch.Tensor, torch.Tensor], entropy: float, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights = torch.linspace(-1, 1, len(found[0]))
    loss = (weights * found[0]).sum()
    return torch.autograd.grad(loss + entropy * (weights.square() * found[1]).sum() if entropy else loss, of)


@pytest.mark.parametrize("entropy", [0.0, 0.3])
@pytest.mark.parametrize("rows", [1, 5, TOKENS, 1000])
def test_values_and_gradients_are_those_of_the_definition_for_any_size_of_chunks(rows: int, entropy: float) -> None:
    hidden, weight, targets, temperature = inputs()
    found = logprobs_and_entropy(
        hidden, weight, targets, temperature, vocabulary=VOCABULARY, chunk_bytes=4 * COLUMNS * rows
    )
    wanted = by_definition(hidden, weight, targets, temperature)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    pairs = (gradients(each, entropy, hidden, weight) for each in (found, wanted))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_the_gradient_of_bfloat16_weights_is_summed_in_float32() -> None:
    hidden, weight, targets, temperature = inputs(torch.bfloat16, 2000)
    many, one = (
        logprobs_and_entropy(hidden, weight, targets, temperature, vocabulary=VOCABULARY, chunk_bytes=size)
        for size in (4 * COLUMNS * 20, 4 * COLUMNS * 2000)
    )
    _, by_many = gradients(many, 0.0, hidden, weight)
    _, by_one = gradients(one, 0.0, hidden, weight)
    assert by_many.dtype is torch.bfloat16
    torch.testing.assert_close(by_many, by_one, rtol=0.02, atol=0.1)


def test_a_column_without_mass_and_a_rank_without_tokens_leave_no_nan() -> None:
    hidden, weight, targets, temperature = inputs()
    with torch.no_grad():
        weight[3] = 1e30  # its logits are infinitely far from all others
    found = logprobs_and_entropy(hidden, weight, targets, temperature, vocabulary=VOCABULARY)
    assert torch.isfinite(found[1]).all()
    nothing = logprobs_and_entropy(hidden[:0], weight, targets[:0], temperature[:0], vocabulary=VOCABULARY)
    assert gradients(nothing, 0.0, weight)[0].count_nonzero() == 0


def test_a_frozen_weight_has_no_gradient_computed() -> None:
    hidden, weight, targets, temperature = inputs()
    found = logprobs_and_entropy(hidden, weight.detach(), targets, temperature, vocabulary=VOCABULARY)
    with Created() as created:
        gradients(found, 0.0, hidden)
    assert (COLUMNS, HIDDEN) not in created.shapes


class Created(TorchDispatchMode):
    """Shapes of the tensors that a block of code creates."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = set[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(one, torch.Tensor):
                self.shapes.add(tuple(one.shape))
        return found


def test_no_more_than_a_chunk_of_logits_is_created() -> None:
    tokens, rows = 400, 20
    hidden, weight, targets, temperature = inputs(tokens=tokens)
    with Created() as created:
        found = logprobs_and_entropy(
            hidden, weight, targets, temperature, vocabulary=VOCABULARY, chunk_bytes=4 * COLUMNS * rows
        )
        gradients(found, 0.3, hidden, weight)
    assert max(shape[0] for shape in created.shapes if len(shape) == 2 and shape[1] == COLUMNS) == rows


def test_chunks_are_larger_only_where_their_passes_are_compiled() -> None:
    assert chunk_rows(COLUMNS, 4 * COLUMNS * 20, compiled=False) == 20
    assert chunk_rows(COLUMNS, 4 * COLUMNS * 20, compiled=True) == 60
