"""Which device a rank takes, and when; torch.cuda is a stand-in in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnlog.plugins.ray.rank_actor import local_rank
from turnlog.settings import from_tables
from turnlog.trainer.launch import follower
from turnlog.trainer.plan import learning_plan

FOUR_DEVICES = {"PYTHONPATH": str(Path(__file__).parents[2] / "fakes" / "cuda")}
IMPORTED = [sys.executable, "-c", "import turnlog.trainer.mcore"]
PLAN = learning_plan(from_tables({"trainer": {"world_size": 4, "tensor_parallel": 2}}, {}, source="test"))


def told(command: list[str], environment: dict[str, str]) -> dict[str, object]:
    """What the process chose."""
    ran = subprocess.run(command, env=environment | FOUR_DEVICES, stdout=subprocess.PIPE, check=True, timeout=120)
    found: dict[str, object] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_that_rank_0_starts_takes_its_own_device_before_megatron_is_imported(rank: int) -> None:
    assert told(*follower(PLAN, rank, 1)) == {"device": rank, "megatron": False}


@pytest.mark.parametrize(("local", "device"), [({}, 0), ({"LOCAL_RANK": "2"}, 2)], ids=["rank 0", "torchrun"])
def test_a_process_takes_the_device_of_its_rank_on_its_machine(local: dict[str, str], device: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    assert told(IMPORTED, environment | local) == {"device": device, "megatron": False}


@pytest.mark.parametrize(
    ("given", "seen", "place"),
    [({}, None, 0), ({"GPU": ["5"]}, "5", 0), ({"GPU": ["5"]}, "4,5", 1), ({"GPU": ["2"]}, None, 2)],
)
def test_a_rank_on_ray_takes_the_device_that_it_was_given(
    given: dict[str, list[str]], seen: str | None, place: int
) -> None:
    assert local_rank(given, {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}) == place


def test_what_ray_imports_of_a_rank_before_it_knows_its_device_is_neither_torch_nor_megatron() -> None:
    program = "import sys, turnlog.plugins.ray.rank_actor; print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120) == "[]\n"


def test_a_rank_without_a_device_of_its_own_is_refused() -> None:
    environment = os.environ | FOUR_DEVICES | {"LOCAL_RANK": "4"}
    ran = subprocess.run(IMPORTED, env=environment, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    assert "LayoutUnfit: 5 ranks on this machine need a device each, torch sees 4" in ran.stderr
