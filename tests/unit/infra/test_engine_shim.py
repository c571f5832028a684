"""What an embedded engine finds of CPU kernels that this machine has no build of."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.engine_operators import engine_operators
from turnlog.infra.embedded import engine_shim

ASKS = """\
import sglang, torch
kernels = torch.ops.sgl_kernel
print(hasattr(kernels, "fused_qk_norm_cpu"), hasattr(kernels, "fused_qk_norm_rope_cpu"), kernels.conv3d_embed_cpu)
try:
    kernels.conv3d_embed_cpu()
except NotImplementedError as error:
    print(error)
"""


def test_kernels_that_mixtures_ask_for_are_not_there_and_what_vision_models_look_up_is_named() -> None:
    env = {**os.environ, "PYTHONPATH": next(iter(engine_shim.__path__))}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ASKS], capture_output=True, text=True, env=env)
    found = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert found[-2].startswith("False False <function"), found
    assert found[-1] == "torch.ops.sgl_kernel.conv3d_embed_cpu was called, and it has no build for this machine"


@pytest.mark.parametrize("window", [None, 2])
def test_sinks_take_their_part_of_the_softmax_and_give_nothing(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator)
    seen = torch.ones(5, 5, dtype=torch.bool).tril().triu(-5 if window is None else -window)
    scores = (query @ key.repeat_interleave(2, 1).mT * 0.3).masked_fill(~seen, -torch.inf)
    weights = torch.cat([scores, sinks[None, :, None, None].expand(1, 4, 5, 1)], -1).softmax(-1)[..., :-1]
    mask = {"is_causal": True} if window is None else {"attn_mask": seen}
    found = engine_operators("sinks").attend_with_sinks(
        query, key, value, sinks=sinks, scale=0.3, enable_gqa=True, **mask
    )
    torch.testing.assert_close(found, weights @ value.repeat_interleave(2, 1))


@pytest.mark.parametrize("rows", [1, 3])
def test_queries_and_gates_of_rows_are_taken_apart_and_a_shared_experts_gate_is_applied(rows: int) -> None:
    """SGLang takes views of what it is given, also of a single row."""
    generator, engine = torch.Generator().manual_seed(0), engine_operators("mamba")
    mixed, weight = (torch.randn(size, generator=generator) for size in ((rows, 2 * 2 * 4 + 4), (4,)))
    q, _, gate = engine.fused_qk_gemma_rmsnorm_with_gate_cpu(mixed[:, :16], mixed[:, 16:], weight, weight, 1e-6, 4, 2)
    heads = mixed[:, :16].view(rows, 2, 2, 4)
    wanted = torch.nn.functional.rms_norm(heads[:, :, 0], (4,), 1 + weight, 1e-6)
    torch.testing.assert_close(q.view(rows, -1), wanted.reshape(rows, -1))
    torch.testing.assert_close(gate.view(rows, -1), heads[:, :, 1].reshape(rows, -1))
    hidden, shared, routed = (torch.randn(rows, 4, generator=generator) for _ in range(3))
    wanted = routed + (hidden @ weight).sigmoid()[:, None] * shared
    engine.fused_gate_sigmoid_mul_add(hidden, weight, shared, routed)
    torch.testing.assert_close(routed, wanted)
