"""What runs cost, told from others: costs are found again, and what they foretell badly is not used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))  # its scripts import each other by their names

import scale

COSTS = scale.Costs(
    kilobytes={
        "on log: agents": [16.0, 1.0, 8.0, 12.0],
        "on log: folded": [1.0, 0.0, 4.0, 8.0],
        "on log: samples": [0.5, 0.0, 4.0, 8.0],
    },
    core_ms={
        "writer": [0.3, 0.2, 0.1, 0.1], "assembler": [0.5, 1.0, 20.0, 0.1], "batcher": [0.1, 0.2, 10.0, 0.0],
        "broker": [1.0, 0.5, 2.0, 0.2],
    },
)  # fmt: skip
WELL = dict.fromkeys((*COSTS.kilobytes, *COSTS.core_ms), 0.01)


def test_costs_are_found_again_in_the_runs_that_they_made() -> None:
    found = scale.Costs.fitted([(load, spent(COSTS, load)) for load in scale.CALIBRATION])
    for what, costs in (COSTS.kilobytes | COSTS.core_ms).items():
        assert (found.kilobytes | found.core_ms)[what] == pytest.approx(costs, abs=1e-6)
    for load in scale.HELD_OUT.values():
        assert spent(found, load) == pytest.approx(spent(COSTS, load))


def spent(costs: scale.Costs, load: scale.Load) -> scale.Spent:
    """What a run costs, as `costs` have it."""
    return costs.foretold(load.features, load.partitions)


def test_held_out_runs_are_none_of_those_that_the_costs_come_from() -> None:
    shapes = {(load.turns, load.delta, load.output) for load in scale.CALIBRATION}
    assert not [name for name, load in scale.HELD_OUT.items() if (load.turns, load.delta, load.output) in shapes]
    assert {(load.partitions, load.processes) for load in scale.HELD_OUT.values()} >= {(2, 2), (4, 1), (4, 2)}


def test_a_second_of_all_tokens_is_copied_and_read_as_often_as_it_is() -> None:
    needs = scale.needed(COSTS, WELL)
    turns, tokens = 6_200_000 / 512, 6200.0
    agents = (16.0 * turns / 32 + turns + 10.0 * tokens) / 1000
    assert needs["mb_per_s"]["on log: agents"] == pytest.approx(agents, abs=0.1)
    folded, samples = needs["mb_per_s"]["on log: folded"], needs["mb_per_s"]["on log: samples"]
    assert needs["into_brokers_mb_per_s"] == pytest.approx(3 * (agents + folded), abs=1)
    assert needs["out_of_brokers_mb_per_s"] == pytest.approx(4 * (agents + folded) + agents + samples, abs=1)
    assert needs["routed_experts_mb_per_s"] == 2381


def test_nothing_is_said_of_what_was_foretold_badly() -> None:
    needs = scale.needed(COSTS, WELL | {"writer": 0.21, "on log: folded": 0.3})
    assert needs["foretold_too_badly"] == ["on log: folded", "writer"]
    assert needs["cores"].keys() == {"assembler", "batcher", "broker"}
    assert "into_brokers_mb_per_s" not in needs
