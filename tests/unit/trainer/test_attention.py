"""Core attention: one call of torch's kernel gives what a call for each row gives; windows and sinks are those of
transformers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from tests.each import each
from turnlog.trainer import mcore
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.launch import process_group
from turnlog.trainer.models.attention import (
    WINDOW_BLOCK,
    Kernel,
    PackedRows,
    RMSNorm,
    SdpaAttention,
    flash_rows,
    varlen_kernel,
)
from turnlog.trainer.network import model_config
from turnlog.trainer.plan import LearnerOptions

EDGES = (0, 5, 6, 14)
WIDTH = TINY.heads * TINY.head_dim


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def attention(kernel: Kernel | None = None, layer: int = 1, **options: Any) -> SdpaAttention:
    """Of TINY, two heads to each of keys; with `kernel` where torch has none."""
    with mcore.quiet():
        config = dataclasses.replace(model_config(TINY, LearnerOptions()), **options)
        found = SdpaAttention(config, layer, None, "self")
    if kernel is not None:
        found.varlen_kernel = lambda *_: kernel  # type: ignore[method-assign]
    return found


def rows(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], PackedRows]:
    """Queries, keys and values of three rows, and where those end."""
    made = [
        torch.randn(EDGES[-1], heads, TINY.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (TINY.heads, TINY.groups, TINY.groups)
    ]
    return made, PackedRows(EDGES, device)


def in_float64(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, _: Any, *longest: int, **named: Any
) -> torch.Tensor:
    """What the kernel is documented to give, by one mask over all pairs."""
    assert longest == (8, 8)
    behind, ahead = named["window_size"]
    assert ahead == 0
    assert named["enable_gqa"]
    assert query.size(-1) == key.size(-1) == value.size(-1)
    q, k, v = (x.double().movedim(1, 0) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.size(0) // x.size(0), 0) for x in (k, v))
    at = torch.arange(query.size(0))
    row = torch.bucketize(at, ends.long(), right=True)
    seen = (row[:, None] == row) & (at[:, None] >= at) & ((behind < 0) | (at[:, None] - at <= behind))
    scores = (q @ k.mT * named["scale"]).masked_fill(~seen, -torch.inf)
    found: torch.Tensor = (scores.softmax(-1) @ v).movedim(0, 1).to(query.dtype)
    return found


@pytest.mark.parametrize("window", [None, (2, 0)])
def test_one_call_gives_what_a_call_each_gives_and_the_same_gradients(window: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    tensors, packing = rows()
    one_by_one = attention(window_size=window)(*tensors, None, packed_seq_params=packing)
    weights = torch.randn_like(one_by_one)
    wanted = torch.autograd.grad((one_by_one * weights).sum(), tensors)
    once = attention(in_float64, window_size=window)(*tensors, None, packed_seq_params=packing)
    assert once.shape == (EDGES[-1], WIDTH)
    torch.testing.assert_close(once, one_by_one)
    for found, gradient in zip(torch.autograd.grad((once * weights).sum(), tensors), wanted, strict=True):
        torch.testing.assert_close(found, gradient)


def test_values_shorter_than_keys_are_what_they_are_without_the_kernel() -> None:
    torch.manual_seed(0)
    (query, key, value), packing = rows()
    tensors = query, key, value[..., :12]
    each = attention()(*tensors, None, packed_seq_params=packing)
    assert each.shape == (EDGES[-1], TINY.heads * 12)
    torch.testing.assert_close(attention(in_float64)(*tensors, None, packed_seq_params=packing), each)


@pytest.mark.parametrize("kernel", [None, flash_rows])
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_torchs_kernels_take_what_they_are_given_and_the_device_is_asked_for_nothing(
    kernel: Kernel | None, window: tuple[int, int] | None
) -> None:
    """On tensors without numbers: reading one raises. flash_rows is what torch has before 2.12."""
    with FakeTensorMode():
        tensors, packing = rows("cuda", torch.bfloat16)
        found = attention(kernel, window_size=window)(*tensors, None, packed_seq_params=packing)
    assert (found.shape, found.dtype, found.device.type) == ((EDGES[-1], WIDTH), torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "head", "kernel"),
    [
        ("cuda", torch.bfloat16, 128, varlen_attn),
        ("cuda", torch.float32, 128, None),
        ("cuda", torch.bfloat16, 12, None),
        ("cuda", torch.bfloat16, 264, None),
        ("cpu", torch.bfloat16, 128, None),
    ],
)
def test_the_kernel_is_taken_where_torch_has_it(
    device: str, dtype: torch.dtype, head: int, kernel: Kernel | None
) -> None:
    assert varlen_kernel(device, dtype, head) is kernel


def by_transformers(
    tensors: list[torch.Tensor], window: int, sinks: torch.Tensor, scale: float, edges: tuple[int, ...]
) -> torch.Tensor:
    """Return [b, s, h, d] of transformers' attention of gpt-oss, of [s, b, h, d] x 3 whose rows end at `edges`."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in tensors)
    at = torch.arange(q.size(2))
    row = torch.bucketize(at, torch.tensor(edges), right=True)
    distance = at[:, None] - at
    seen = (row[:, None] == row) & (distance >= 0) & (distance < (window or q.size(2)))
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    module: Any = SimpleNamespace(sinks=sinks, num_key_value_groups=q.size(1) // k.size(1), training=False)
    found: torch.Tensor = eager_attention_forward(module, q, k, v, mask, scale)[0]
    return found


@each(
    ("rows", "window", "sinks", "positions"),
    [
        *itertools.product(("padded", "packed", "masked"), (0, 1, 7), ("vanilla", "learnable"), (20,)),
        ("padded", 7, "learnable", WINDOW_BLOCK + 30),
    ],
)
def test_windows_and_sinks_are_those_of_transformers(rows: str, window: int, sinks: str, positions: int) -> None:
    torch.manual_seed(1)
    size = (window - 1, 0) if window else None
    own = attention(window_size=size, softmax_type=sinks)
    learned = torch.full((TINY.heads,), -torch.inf)  # a sink of no weight
    if own.softmax_offset is not None:
        learned = torch.nn.init.normal_(own.softmax_offset)
    together = 1 if rows == "packed" else 2
    tensors = [
        torch.randn(positions, together, heads, TINY.head_dim) for heads in (TINY.heads, TINY.groups, TINY.groups)
    ]
    inputs = [*(x.requires_grad_() for x in tensors), *own.parameters()]
    edges = (0, 5, 6, positions) if rows == "packed" else (0, positions)
    if rows == "packed":
        packing = PackedRows(edges, "cpu")
        found = own(*(x.squeeze(1) for x in tensors), None, packed_seq_params=packing)
    else:
        later = torch.ones(positions, positions, dtype=torch.bool).triu(1)
        found = own(*tensors, later if rows == "masked" else None)
    wanted = by_transformers(tensors, window, learned, own.scale, edges).transpose(0, 1).reshape(found.shape)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((x * weights).sum(), inputs) for x in (found, wanted)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_windows_are_of_the_layers_that_the_pattern_marks() -> None:
    pattern = [attention(layer=layer, window_size=(3, 0), window_attn_skip_freq=[1, 0]).window for layer in (1, 2)]
    assert pattern == [4, 0]


def test_a_long_row_never_computes_all_pairs_of_a_window() -> None:
    own = attention(window_size=(15, 0))
    positions = 3 * WINDOW_BLOCK
    tensors = [torch.randn(positions, 1, heads, TINY.head_dim) for heads in (TINY.heads, TINY.groups, TINY.groups)]
    with torch.profiler.profile(record_shapes=True) as seen:
        own(*tensors, None)
    keys = [event.input_shapes[1][2] for event in seen.events() if event.name == "aten::scaled_dot_product_attention"]
    assert keys == [WINDOW_BLOCK, *[WINDOW_BLOCK + 15] * 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_around_zero_is_that_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    with mcore.quiet():
        config = dataclasses.replace(model_config(TINY, LearnerOptions()), layernorm_zero_centered_gamma=True)
    own, theirs = RMSNorm(config, 64, eps=1e-6).to(dtype), Gemma3RMSNorm(64).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(64)), own.weight.copy_(theirs.weight)
    x = torch.randn(3, 5, 64, dtype=dtype)
    torch.testing.assert_close(own(x), theirs(x), rtol=1e-6 if dtype is torch.float32 else 0, atol=1e-6)
