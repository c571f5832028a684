"""A run whose engines are of two kinds: a real SGLang and a real vLLM, both on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 5
EXACT = 1e-4
"""Largest log-prob gap in nats of two float32 implementations of one model."""


@pytest.mark.long
@pytest.mark.kafka
@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("vllm_installed")
def test_a_run_trains_on_tokens_of_both_kinds_and_records_the_gap_of_each(tmp_path: Path) -> None:
    """A demo ends with 0 only if the books balance, every version was acknowledged and the replay is identical."""
    run = tmp_path / "mixed"
    env = os.environ | {
        "TURNLOG_RUN_ID": "mixed", "TURNLOG_RUN_DIRECTORY": str(run), "TURNLOG_ENGINE_COUNT": "2",
        "TURNLOG_ENGINE_KINDS": "sglang,vllm", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "turnlog.cli", "demo", "--steps", str(STEPS)]
    demo = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    assert demo.returncode == 0, demo.stdout
    body = json.loads((run / "report.json").read_text())
    assert body["steps"] == STEPS
    assert body["replay"]["batches_compared"] == STEPS
    assert set(body["weight_versions_acknowledged"]) == {"engine-0", "engine-1"}
    assert set(body["logprob_gap_by_kind"]) == {"sglang", "vllm"}, "both kinds sampled tokens that were trained"
    assert max(body["logprob_gap_by_kind"].values()) < EXACT
