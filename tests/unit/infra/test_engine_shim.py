"""What an embedded engine finds of CPU kernels that this machine has no build of."""

from __future__ import annotations

import os
import subprocess
import sys

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
