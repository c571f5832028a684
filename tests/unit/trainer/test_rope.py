"""Scaled rotary positions: those of SGLang, and config.json on which engines and transformers do not agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.each import each
from turnlog.infra.embedded import engine_shim
from turnlog.infra.embedded.servers import CPU_ENVIRONMENT
from turnlog.trainer import UnsupportedModel
from turnlog.trainer.families.rope import read_rope, rope_json
from turnlog.trainer.families.shape import YarnScaling
from turnlog.trainer.models.decoder import yarn_frequencies

YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0,
}  # fmt: skip
ENGINE = """\
import json, sys, torch
from transformers import Qwen3Config
from sglang.srt.layers.rotary_embedding.factory import get_rope
found = []
for rope in json.loads(sys.argv[1]):
    config = Qwen3Config(head_dim=16, max_position_embeddings=256, rope_scaling=rope)
    rope = config.rope_parameters
    built = get_rope(16, 16, 256, rope["rope_theta"], True, rope, torch.float32)
    found.append(built.cos_sin_cache[:256])
torch.save(found, sys.argv[2])
"""
SCALED = [YARN, YARN | {"truncate": False}, YARN | {"beta_fast": 8, "mscale": 1.0, "mscale_all_dim": 0.5}]


def test_yarn_is_that_of_the_engine(tmp_path: Path) -> None:
    """`served` [256, 16] holds the cosines and sines of SGLang's model."""
    path = os.pathsep.join((next(iter(engine_shim.__path__)), *sys.path))
    command = [sys.executable, "-W", "ignore", "-c", ENGINE, json.dumps(SCALED), str(tmp_path / "found")]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **CPU_ENVIRONMENT, "PYTHONPATH": path})
    for values, served in zip(SCALED, torch.load(tmp_path / "found"), strict=True):
        rope = read_rope({"rope_scaling": values, "max_position_embeddings": 256}, 10_000.0)
        assert isinstance(rope.scaling, YarnScaling)
        plain = 1.0 / 500.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
        angles = torch.outer(torch.arange(256.0), yarn_frequencies(plain, rope.theta, rope.scaling))
        torch.testing.assert_close(
            torch.cat([angles.cos(), angles.sin()], -1) * rope.scaling.attention, served, rtol=0, atol=1e-6
        )


@each(
    ("change", "message"),
    [
        ({"attention_factor": 1.0}, "attention_factor = 1.0 .* is not supported: engines compute 1.138"),
        ({"attn_factor": 2.0}, "attn_factor = 2.0 .* counts for engines alone"),
        ({"extrapolation_factor": 0.5}, "extrapolation_factor = 0.5"),
        ({"mscale": 1.0, "mscale_all_dim": 0}, "mscale_all_dim = 0"),
        ({"beta_fast": None}, "beta_fast = None"),
        ({"factor": None}, "factor = None"),
    ],
)
def test_yarn_on_which_engines_and_transformers_do_not_agree_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_rope({"rope_scaling": YARN | change, "max_position_embeddings": 256}, 10_000.0)


@each("values", [*SCALED, YARN | {"rope_type": "linear"}, {"rope_type": "default", "rope_theta": 500.0}])
def test_rotary_positions_that_are_written_are_read_again(values: dict[str, Any]) -> None:
    rope = read_rope({"rope_scaling": values, "max_position_embeddings": 256}, 10_000.0)
    assert read_rope({"rope_parameters": rope_json(rope), "max_position_embeddings": 256}, 10_000.0) == rope
