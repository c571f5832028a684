"""The trainer on this machine's first GPU, compared with the CPU and measured: `make gpu`.

It runs from the source tree, on Python 3.11 or later and torch 2.6 or later, with what the trainer imports. Results are
printed as lines of JSON and as a table. Without a device, only the smallest model is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
MEASURE, FAST_PATHS, TRANSFERS = (
    Path(__file__).with_name(name) for name in ("measure.py", "fast_paths.py", "transfers.py")
)
FAKES = Path(__file__).parents[1] / "fakes"
PEAK_TFLOPS = float(os.environ.get("BENCH_PEAK_TFLOPS", "989"))
"""Dense bfloat16 peak of an H100 or H200 (NVIDIA's data sheets)."""
LIMIT_S = float(os.environ.get("GPU_MINUTES", "10")) * 60 - 60
"""Seconds after which no further case begins."""
BEGAN = time.time()
measured: list[dict[str, Any]] = []


@cache
def results(what: str, devices: str = "0", script: Path = MEASURE) -> list[dict[str, Any]]:
    """Return what a script prints in a process of its own; `devices` is what it sees."""
    path = os.pathsep.join((str(FAKES), os.environ.get("PYTHONPATH", "")))
    env = os.environ | {"CUDA_VISIBLE_DEVICES": devices, "PYTHONPATH": path}
    until = ("--until", str(BEGAN + LIMIT_S)) if script is MEASURE else ()
    command = [sys.executable, str(script), what, *until]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        shown = {name: value for name, value in line.items() if name != "weights"}
        print(json.dumps({"what": what} | shown), file=sys.__stdout__, flush=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return lines


def alike(kind: str, dtype: str, packing: str = "off", devices: str = "0") -> dict[str, Any]:
    """Return two steps of a small policy."""
    wanted = {"kind": kind, "dtype": dtype, "packing": packing}
    (found,) = [line for line in results("alike", devices) if wanted.items() <= line.items()]
    return found


@on_device
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_two_steps_in_float32_are_those_of_the_cpu(kind: str) -> None:
    cpu, gpu = alike(kind, "float32", devices=""), alike(kind, "float32")
    assert (cpu["device"], gpu["device"]) == ("cpu", "cuda:0")
    assert gpu["losses"] == pytest.approx(cpu["losses"], rel=1e-4)
    assert gpu["norms"] == pytest.approx(cpu["norms"], rel=1e-4)
    assert gpu["weights"] == pytest.approx(cpu["weights"], rel=1e-5)


@on_device
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_step_in_bfloat16_is_near_that_in_float32(kind: str) -> None:
    assert alike(kind, "bfloat16")["losses"][0] == pytest.approx(alike(kind, "float32")["losses"][0], abs=0.02)
    assert alike(kind, "bfloat16")["norms"][0] == pytest.approx(alike(kind, "float32")["norms"][0], rel=0.05)


@on_device
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_rows_are_near_padded_ones(kind: str, dtype: str) -> None:
    packed, padded = alike(kind, dtype, "on"), alike(kind, dtype)
    assert packed["losses"] == pytest.approx(padded["losses"], abs=0.02)
    assert packed["norms"] == pytest.approx(padded["norms"], rel=0.05)


@on_device
def test_passes_do_not_wait_for_the_device_and_kernels_compute_what_they_should() -> None:
    found = {line["check"]: line.get("found", line.get("error")) for line in results("checks", script=FAST_PATHS)}
    assert {found[f"waits, packing {packing}"] for packing in ("off", "on")} == {"no wait"}
    assert max(found["output layer"].values()) < 0.02
    assert "Traceback" not in str(found["packed attention"])


@on_device
def test_deterministic_steps_are_the_same_bit_for_bit() -> None:
    assert {line["same"] for line in results("deterministic")} == {True}


def test_a_prompt_that_is_computed_once_gives_the_step_of_separate_rows() -> None:
    for line in results("trees"):
        once, each = line["auto"], line["off"]
        near = {"float32": 1e-5, "bfloat16": 0.02}[line["dtype"]]
        assert once["computed"] < each["computed"] / 2
        assert once["losses"] == pytest.approx(each["losses"], abs=near)
        assert once["norms"] == pytest.approx(each["norms"], rel=2 * near)


def test_digests_on_this_device_are_those_of_the_cpu() -> None:
    (found,) = results("digests", script=TRANSFERS)
    assert found["as_on_cpu"]
    assert found["gb_per_s"] > 0


def test_buckets_reach_another_process_on_this_device_as_they_were_sent() -> None:
    sent = {line["way"]: line for line in results("buckets", "0,1", TRANSFERS)}
    assert sent["shared"]["as_sent"]
    if torch.cuda.device_count() == 1:
        assert sent["nccl"] == {"way": "nccl", "skipped": "it needs two GPUs"}
    else:
        assert sent["nccl" if torch.cuda.is_available() else "gloo"]["as_sent"]


def test_a_model_is_exported_in_buckets_without_another_copy_of_it() -> None:
    (found,) = results("stream", script=TRANSFERS)
    assert found["as_on_cpu"]
    if found["beside_bytes"] is not None:
        assert found["beside_bytes"] <= found["limit"]


@pytest.fixture(scope="module")
def table() -> Iterator[None]:
    """Print a table of what was measured, at the end."""
    yield
    shown = [f"\n| model | rows | packing | tokens/s | TFLOP/s | MFU | peak GB | predicted |\n|{'---|' * 8}"]
    for line in measured:
        rows = f"{line['length']:,} tokens" + (" at most" if line["ragged"] else "")
        how = line["packing"] + (", recompute " + line["recompute"] if line["recompute"] != "none" else "")
        if "error" in line:
            shown.append(f"| {line['what']} | {rows} | {how} | {line['error']} | | | | |")
            continue
        mfu = "" if line["device"] == "cpu" else f"{line['tflops'] / PEAK_TFLOPS:.3f}"
        memory = (line["peak_gb"], line["predicted_gb"]) if line["peak_gb"] else ("", "")
        about = (rows, how, f"{line['tokens_per_s']:,}", line["tflops"], mfu, *memory)
        shown.append(f"| {line['what']} | {' | '.join(map(str, about))} |")
    print("\n".join(shown), file=sys.__stdout__, flush=True)


def check(what: str) -> list[dict[str, Any]]:
    """Measure a model and return the results of the cases that ran, at least one."""
    lines = [{"what": what} | line for line in results(what)]
    measured.extend(lines)
    ran = [line for line in lines if "error" not in line]
    assert ran, f"no case of {what} ran"
    assert all(line["grad_norm"] > 0 for line in ran)
    return ran


def test_the_smallest_model_is_measured_on_any_device(table: None) -> None:
    for line in check("small"):
        assert line["tokens_per_s"] > 0


@on_device
@pytest.mark.proves("on a GPU", "qwen3")
def test_the_shape_of_qwen3_0_6b_trains(table: None) -> None:
    assert {0.55e9 < line["parameters"] < 0.65e9 for line in check("qwen3-0.6b")} == {True}


@on_device
def test_the_shape_of_qwen3_4b_trains(table: None) -> None:
    assert {3.9e9 < line["parameters"] < 4.2e9 for line in check("qwen3-4b")} == {True}


@on_device
def test_adapters_of_the_shape_of_qwen3_8b_train(table: None) -> None:
    for line in check("qwen3-8b-lora"):
        assert 8e9 < line["parameters"] < 8.3e9
        assert 2 * line["parameters"] < line["peak_gb"] * 1e9


@on_device
@pytest.mark.proves("on a GPU", "qwen3_moe")
def test_layers_of_the_shape_of_qwen3_30b_a3b_train(table: None) -> None:
    assert {2.9e9 < line["parameters"] < 3.2e9 for line in check("qwen3-30b-a3b-4-layers")} == {True}
