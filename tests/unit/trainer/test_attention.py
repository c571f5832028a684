"""Packed rows are one call of torch's kernel where it has one, and see no more than they do in a call each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from turnlog.trainer import mcore
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.models.attention import Kernel, SdpaAttention, varlen_kernel
from turnlog.trainer.network import model_config
from turnlog.trainer.plan import LearnerOptions

EDGES = (0, 5, 6, 14)
WIDTH = TINY.heads * TINY.head_dim


def attention(kernel: Kernel | None = None) -> SdpaAttention:
    """Of TINY, two heads to each of keys; with `kernel` where torch has none."""
    with mcore.quiet():
        found = SdpaAttention(model_config(TINY, LearnerOptions()), 1, None, "self")
    if kernel is not None:
        found.varlen_kernel = lambda *_: kernel  # type: ignore[method-assign]
    return found


def rows(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], mcore.PackedSeqParams]:
    """Queries, keys and values of three rows, and where those end."""
    made = [
        torch.randn(EDGES[-1], heads, TINY.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (TINY.heads, TINY.groups, TINY.groups)
    ]
    ends = torch.tensor(EDGES, dtype=torch.int32, device=device)
    return made, mcore.PackedSeqParams("thd", ends, ends, max_seqlen_q=8, max_seqlen_kv=8)


def in_float64(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, _: Any, *longest: int, **named: Any
) -> torch.Tensor:
    """What the kernel is documented to give, by one mask over all pairs."""
    assert longest == (8, 8)
    assert named["window_size"] == (-1, 0)
    assert named["enable_gqa"]
    q, k, v = (x.double().movedim(1, 0) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.size(0) // x.size(0), 0) for x in (k, v))
    at = torch.arange(query.size(0))
    row = torch.bucketize(at, ends.long(), right=True)
    seen = (row[:, None] == row) & (at[:, None] >= at)
    scores = (q @ k.mT * named["scale"]).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).movedim(0, 1).to(query.dtype)


def test_one_call_gives_what_a_call_each_gives_and_the_same_gradients() -> None:
    torch.manual_seed(0)
    tensors, packing = rows()
    each = attention()(*tensors, None, packed_seq_params=packing)
    weights = torch.randn_like(each)
    wanted = torch.autograd.grad((each * weights).sum(), tensors)
    once = attention(in_float64)(*tensors, None, packed_seq_params=packing)
    assert once.shape == (EDGES[-1], WIDTH)
    torch.testing.assert_close(once, each)
    for found, gradient in zip(torch.autograd.grad((once * weights).sum(), tensors), wanted, strict=True):
        torch.testing.assert_close(found, gradient)


def test_torchs_kernel_takes_what_it_is_given_and_the_device_is_asked_for_nothing() -> None:
    """On tensors without numbers: reading one, as a call each does of where rows end, raises."""
    with FakeTensorMode():
        tensors, packing = rows("cuda", torch.bfloat16)
        found = attention()(*tensors, None, packed_seq_params=packing)
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
