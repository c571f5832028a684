"""The trainer on a CUDA device, beside the same on the CPU of its machine: `make test GPU=1`.

It runs from the source tree, on Python 3.11 or later and torch 2.6 or later, with what the trainer imports. Figures are
printed, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
STEPS = Path(__file__).with_name("steps.py")
FAKES = Path(__file__).parents[1] / "fakes"
PEAK_TFLOPS = float(os.environ.get("BENCH_PEAK_TFLOPS", "989"))
"""Of an H100 in dense bfloat16 (NVIDIA's data sheet)."""


@cache
def found(what: str, devices: str = "0") -> dict[str, Any]:
    """What a process of its own says; `devices` that it sees."""
    path = os.pathsep.join((str(FAKES), os.environ.get("PYTHONPATH", "")))
    env = os.environ | {"CUDA_VISIBLE_DEVICES": devices, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(STEPS), what], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    shown = {name: value for name, value in line.items() if name != "weights"}
    print(json.dumps({"what": what} | shown), file=sys.__stdout__, flush=True)
    return line


def test_two_steps_in_float32_are_those_of_the_cpu() -> None:
    cpu, gpu = found("float32", ""), found("float32")
    assert (cpu["device"], gpu["device"]) == ("cpu", "cuda:0")
    assert gpu["losses"] == pytest.approx(cpu["losses"], rel=1e-4)
    assert gpu["norms"] == pytest.approx(cpu["norms"], rel=1e-4)
    assert gpu["weights"] == pytest.approx(cpu["weights"], rel=1e-5)


def test_a_step_in_bfloat16_is_near_that_in_float32() -> None:
    assert found("bfloat16")["losses"][0] == pytest.approx(found("float32")["losses"][0], abs=0.02)
    assert found("bfloat16")["norms"][0] == pytest.approx(found("float32")["norms"][0], rel=0.05)


def test_packed_rows_in_bfloat16_are_near_padded_ones() -> None:
    """By torch's kernel for rows of varying length from torch 2.12 on: the line says."""
    assert found("packed")["losses"] == pytest.approx(found("bfloat16")["losses"], abs=0.02)
    assert found("packed")["norms"] == pytest.approx(found("bfloat16")["norms"], rel=0.05)


@pytest.mark.proves("on a GPU", "qwen3")
def test_the_shape_of_qwen3_0_6b_trains_and_is_exported() -> None:
    line = found("qwen3-0.6b")
    print(json.dumps({"what": "mfu", "value": round(line["tflops"] / PEAK_TFLOPS, 3)}), file=sys.__stdout__, flush=True)
    assert line["grad_norm"] > 0
    assert 0.55e9 < line["parameters"] < 0.65e9
    assert line["export_bytes"] >= 2 * line["parameters"]


@pytest.mark.proves("on a GPU", "qwen2")
def test_adapters_of_a_7b_shape_take_a_step_within_one_device() -> None:
    line = found("lora-7b")
    assert line["grad_norm"] > 0
    assert line["parameters"] > 7e9
    assert 2 * line["parameters"] < line["peak_gib"] * 2**30 < 79 * 2**30
