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
