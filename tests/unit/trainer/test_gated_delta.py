"""The gated delta net against transformers' own layer: outputs and gradients, rows packed and padded."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from tests.each import each
from tests.engine_operators import engine_operators
from turnlog.trainer import mcore
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.launch import process_group
from turnlog.trainer.models import gated_delta
from turnlog.trainer.models.attention import PackedRows
from turnlog.trainer.models.gated_delta import DeltaKernels, DeltaSubmodules, GatedDeltaNet, gated_delta_rule
from turnlog.trainer.network import model_config
from turnlog.trainer.plan import LearnerOptions

HEADS: dict[str, int] = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 6, "kernel": 4}
LENGTHS = (70, 3, 1, 64, 130)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def by_key_head(sections: list[torch.Tensor]) -> torch.Tensor:
    """Arrange rows that lie section by section as one key head's after the other's."""
    return torch.cat([each.unflatten(0, (HEADS["key_heads"], -1)) for each in sections], 1).flatten(0, 1)


def by_our_names(theirs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Arrange tensors under transformers' names as parameters under ours."""
    keys, values = HEADS["key_heads"] * HEADS["key_dim"], HEADS["value_heads"] * HEADS["value_dim"]
    sizes = [keys, keys, values]
    others = [theirs[f"in_proj_{each}.weight"] for each in "zba"]
    return {
        "linear_qkv.weight": by_key_head([*theirs["in_proj_qkv.weight"].split(sizes), *others]),
        "linear_proj.weight": theirs["out_proj.weight"],
        "convolution": by_key_head(list(theirs["conv1d.weight"].split(sizes))),
        "rate_bias": theirs["dt_bias"],
        "decay_log": theirs["A_log"],
        "norm": theirs["norm.weight"],
    }


@torch.no_grad()
def layers(scale: float = 1.0) -> tuple[GatedDeltaNet, Qwen3_5GatedDeltaNet]:
    """Return our layer and transformers', with the same random weights."""
    config = Qwen3_5TextConfig(
        hidden_size=TINY.hidden,
        rms_norm_eps=TINY.norm_epsilon,
        linear_num_key_heads=HEADS["key_heads"],
        linear_num_value_heads=HEADS["value_heads"],
        linear_key_head_dim=HEADS["key_dim"],
        linear_value_head_dim=HEADS["value_dim"],
        linear_conv_kernel_dim=HEADS["kernel"],
    )
    theirs = Qwen3_5GatedDeltaNet(config, 0)
    generator = torch.Generator().manual_seed(3)
    for parameter in theirs.parameters():
        parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    theirs.norm.weight += 1.0
    with mcore.quiet():
        groups = mcore.ProcessGroupCollection.use_mpu_process_groups()
        ours = GatedDeltaNet(model_config(TINY, LearnerOptions()), DeltaSubmodules(), **HEADS, pg_collection=groups)
    weights = by_our_names(dict(theirs.named_parameters()))
    assert {name for name, _ in ours.named_parameters()} == weights.keys()
    for name, parameter in ours.named_parameters():
        parameter.copy_(weights[name])
    return ours, theirs


def run(ours: GatedDeltaNet, given: torch.Tensor, **named: Any) -> torch.Tensor:
    with mcore.quiet():
        found: torch.Tensor = ours(given, **named)[0]
    return found


def row_outputs(theirs: Qwen3_5GatedDeltaNet, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [theirs(row[None])[0] for row in rows]


def check_gradients(
    ours: GatedDeltaNet, found: torch.Tensor, theirs: Qwen3_5GatedDeltaNet, wanted: torch.Tensor
) -> None:
    """Compare outputs [t, h], and the gradient of every parameter for the same gradient of the outputs."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    slopes = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(7))
    mine = gradients(found * slopes, ours)
    for name, gradient in by_our_names(gradients(wanted * slopes, theirs)).items():
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-4, msg=message)


def gradients(total: torch.Tensor, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total.sum(), parameters), strict=True))


def random_rows(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(length, TINY.hidden, generator=generator) for length in lengths]


def packing(lengths: tuple[int, ...] = LENGTHS) -> Any:
    return PackedRows([*itertools.accumulate(lengths, initial=0)], "cpu")


@each("scale", [1.0, 3.0])
def test_packed_rows_give_the_outputs_and_gradients_of_transformers_row_by_row(scale: float) -> None:
    ours, theirs = layers(scale)
    rows = random_rows()
    found = run(ours, torch.cat(rows)[:, None], packed_seq_params=packing())
    check_gradients(ours, found[:, 0], theirs, torch.cat(row_outputs(theirs, rows)))


def test_padding_behind_rows_changes_neither_outputs_nor_gradients() -> None:
    ours, theirs = layers()
    rows = random_rows()
    padded = torch.nn.utils.rnn.pad_sequence(rows, padding_value=7.0)
    found = run(ours, padded)
    within = torch.cat([found[: len(row), place] for place, row in enumerate(rows)])
    check_gradients(ours, within, theirs, torch.cat(row_outputs(theirs, rows)))


def step_by_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor
) -> torch.Tensor:
    """Compute the rule as the module's docstring states it, in float64, for one head: [s, d] x 3 and [s] x 2."""
    query, key, value, decay, rate = (x.double() for x in (query, key, value, decay, rate))
    state = torch.zeros(key.size(-1), value.size(-1), dtype=torch.float64)
    found = []
    for q, k, v, g, beta in zip(query, key, value, decay, rate, strict=True):
        q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
        state = state * g.exp()
        state = state + torch.outer(k, beta * (v - state.T @ k))
        found.append(state.T @ q / len(q) ** 0.5)
    return torch.stack(found)


@each("decays", [0.01, 1.0, 30.0])
def test_chunks_give_what_the_rule_gives_step_by_step(decays: float) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(200, 2, 3, 8, generator=generator) for _ in range(3))
    decay, rate = -decays * torch.rand(200, 2, 3, generator=generator), torch.rand(200, 2, 3, generator=generator)
    found = gated_delta_rule(query, key, value, decay, rate)
    for row in range(2):
        for head in range(3):
            of_head = (x[:, row, head] for x in (query, key, value, decay, rate))
            torch.testing.assert_close(found[:, row, head].double(), step_by_step(*of_head), rtol=0, atol=1e-5)


def test_strong_decay_over_a_chunk_has_a_finite_gradient() -> None:
    tensors = [torch.randn(130, 1, 1, 4, requires_grad=True) for _ in range(3)]
    decay, rate = torch.full((130, 1, 1), -80.0, requires_grad=True), torch.full((130, 1, 1), 0.5, requires_grad=True)
    found = gated_delta_rule(*tensors, decay, rate)
    gradients = torch.autograd.grad(found.square().sum(), [*tensors, decay, rate])
    assert all(gradient.isfinite().all() for gradient in gradients)


def kernels_of_torch() -> DeltaKernels:
    """Return functions with the signatures of flash-linear-attention that compute row by row with torch."""

    def rows_of(x: torch.Tensor, ends: torch.Tensor | None) -> list[torch.Tensor]:
        return list(x.unbind(0)) if ends is None else list(x[0].split(ends.diff().tolist()))

    def together(rows: list[torch.Tensor], ends: torch.Tensor | None) -> torch.Tensor:
        return torch.stack(rows) if ends is None else torch.cat(rows)[None]

    def convolution(
        x: torch.Tensor, weight: torch.Tensor, *, activation: str, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        assert activation == "silu"
        found = [gated_delta.causal_convolution(row[:, None], weight[:, None])[:, 0] for row in rows_of(x, cu_seqlens)]
        return together(found, cu_seqlens), None

    def rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, None]:
        assert use_qk_l2norm_in_kernel
        tables = zip(*(rows_of(x, cu_seqlens) for x in (q, k, v, g, beta)), strict=True)
        found = [gated_delta_rule(*(x[:, None] for x in row))[:, 0] for row in tables]
        return together(found, cu_seqlens), None

    return DeltaKernels(convolution, rule)


@each("packed", [True, False])
def test_kernels_are_given_the_layout_of_flash_linear_attention(packed: bool) -> None:
    ours, _ = layers()
    rows = random_rows((9, 9) if not packed else LENGTHS)
    given = torch.cat(rows)[:, None] if packed else torch.stack(rows, 1)
    named = {"packed_seq_params": packing()} if packed else {}
    wanted = run(ours, given, **named)
    ours.kernels = lambda _: kernels_of_torch()  # type: ignore[method-assign]
    found = run(ours, given, **named)
    torch.testing.assert_close(found, wanted)


def test_a_processor_has_no_kernels() -> None:
    assert gated_delta.delta_kernels("cpu") is None


def test_an_engine_that_continues_rows_from_its_pools_computes_what_the_trainer_does() -> None:
    """Rows of 5 and 9 tokens, then two more of each, one at a time; a third row is padding."""
    engine, random = engine_operators("mamba"), torch.Generator().manual_seed(1)
    length, (heads, shared, size, channels) = 11, (2, 2, 4, 6)

    def rows(*sizes: int) -> torch.Tensor:
        return torch.randn(length, 2, *sizes, generator=random)

    x, weight = rows(channels), torch.randn(channels, 4, generator=random)
    q, k, v = rows(heads, size), rows(heads, size), rows(heads * shared, size + 1)
    a, b = rows(heads * shared), rows(heads * shared)
    a_log, bias = torch.randn(2, heads * shared, generator=random)
    g, beta = engine.fused_gdn_gating_cpu(a_log, a, b, bias)
    spread = [x.repeat_interleave(shared, 2) for x in (q, k)]
    wanted_rule = gated_delta_rule(*spread, v, g[0], beta[0])
    wanted_convolution = gated_delta.causal_convolution(x, weight[:, None])
    slots, ends = torch.tensor([2, 0, -1]), torch.tensor([0, 5, 14, 14])
    convolved, states = torch.full((3, channels, 3), 7.0), torch.zeros(3, heads * shared, size + 1, size)

    def prompts(table: torch.Tensor) -> torch.Tensor:
        return torch.cat([table[:5, 0], table[:9, 1]])

    found = engine.causal_conv1d_fn_cpu(
        prompts(x).T, weight, None, conv_states=convolved, has_initial_state=torch.zeros(3, dtype=torch.bool),
        cache_indices=slots, query_start_loc=ends, activation="silu",
    )  # fmt: skip
    torch.testing.assert_close(found.T, prompts(wanted_convolution))
    pool = {"initial_state": states, "initial_state_indices": slots}
    named = {"q": q, "k": k, "v": v, "g": g[0], "beta": beta[0]}
    packed = {name: prompts(table)[None] for name, table in named.items()}
    found, *_ = engine.chunk_gated_delta_rule_cpu(**packed, **pool, cu_seqlens=ends)
    torch.testing.assert_close(found[0], prompts(wanted_rule), atol=1e-5, rtol=1e-5)
    for step in range(2):
        at = torch.tensor([5 + step, 9 + step, 0]), torch.tensor([0, 1, 0])
        found = engine.causal_conv1d_update_cpu(x[at], convolved, weight, None, "silu", conv_state_indices=slots)
        torch.testing.assert_close(found[:2], wanted_convolution[at][:2])
        found = engine.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=a_log, dt_bias=bias, **{name: table[at][None] for name, table in zip("qkv", (q, k, v), strict=True)},
            a=a[at], b=b[at], initial_state_source=states, initial_state_indices=slots, cu_seqlens=torch.arange(4),
        )  # fmt: skip
        torch.testing.assert_close(found[0, :2], wanted_rule[at][:2], atol=1e-5, rtol=1e-5)
        assert not found[0, 2].any()
