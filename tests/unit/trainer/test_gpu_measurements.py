"""`make gpu` on a machine without a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_without_a_device_the_smallest_model_is_measured(tmp_path: Path) -> None:
    command = subprocess.run(
        ["make", "--no-print-directory", "--just-print", "gpu"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()[-1]
    with_this_python = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=os.environ | with_this_python, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| small | 128 tokens") == 3
    assert "no CUDA device" in done.stdout
