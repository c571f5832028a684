"""What a soak says of what it saw: who grows, what it cannot tell, and the page that shows it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks/chaos"))  # its scripts import each other by their names

from soak_looks import CONTROL, Looks, held_mb, lies, tree
from soak_page import page

from turnlog.consumers.lag import Lag
from turnlog.infra.log import Partition

MINUTES, LEAK = 20.0, 2.0
PAIRS = {"assembler-0": 0.0, "batcher-0": LEAK, CONTROL: LEAK}


class Unneeded:
    """In place of the run: nothing here asks it."""


def looks(*, kept: float = 0.0, disk: float = 0.0) -> Looks:
    """Twenty minutes under load: one role leaks, all are killed in the middle; `kept`: records a minute that a role
    leaves lying of 600 that arrive, `disk`: MB a minute that topics gain."""
    rng, found = np.random.default_rng(0), Looks(Unneeded(), Unneeded())  # type: ignore[arg-type]
    found.load_at, found.ended_at, found.capacity, found.rate = 60.0, 60 * MINUTES, 20.0, 16.0
    for at in range(0, int(60 * MINUTES), 5):
        life = int(at > 30 * MINUTES)
        for name, leak in PAIRS.items():
            held = 60.0 + leak * (at / 60 - life * MINUTES / 2) + rng.normal(0, 0.3)
            found.memory[name].setdefault(100 + life, []).append((float(at), held))
        found.lag["assembler"].append((float(at), kept * at / 60 + rng.integers(0, 30)))
        found.arrived["assembler"].append((float(at), 10.0 * at))
        found.turns.append((float(at), 16.0 * at))
        found.disk["topics"].append((float(at), 20.0 + disk * at / 60 + at % 60 / 20))
        found.disk["archive"].append((float(at), float(at)))
    found.kills = [(30 * MINUTES, name) for name in PAIRS]
    return found


def test_the_role_that_leaks_is_named_and_no_other() -> None:
    judged = looks().judged(LEAK)
    (grows,) = judged["grows"]
    assert grows.startswith("memory of batcher-0: +2.0")
    assert not judged["unsure"]
    assert judged["control_found"]
    assert all(judged["leak_would_be_found"].values()), "the noise of no role would hide a leak"


@pytest.mark.parametrize(("of", "what"), [({"kept": 60.0}, "lag of assembler"), ({"disk": 2.0}, "disk: topics")])
def test_what_is_left_lying_is_named(of: dict[str, float], what: str) -> None:
    grows = looks(**of).judged(LEAK)["grows"]
    assert [each for each in grows if each.startswith(f"{what}: +")] == grows[1:] != []


def test_of_a_short_run_it_cannot_tell() -> None:
    short = looks()
    short.memory["assembler-0"] = {100: short.memory["assembler-0"][100][:30]}
    assert [each.partition(":")[0] for each in short.judged(LEAK)["unsure"]] == ["memory of assembler-0"]


def test_the_page_is_one_file_with_its_charts() -> None:
    seen = looks()
    detail: dict[str, Any] = {"minutes": MINUTES, "offered_turns_per_s": 16.0, "capacity_turns_per_s": 20.0}
    text = page({"id": "soak", "kills": 3, "ok": False, "detail": detail | seen.judged(LEAK)}, seen)
    assert text.count("<svg") == text.count("</svg>") == 4
    assert "Soak of 20 minutes: did not pass" in text
    assert "memory of batcher-0" in text
    assert not [part for part in ("<script", "src=", "@import") if part in text], "it loads nothing"


def test_turns_and_lag_are_counted_from_looks_at_the_log() -> None:
    seen = Looks(Unneeded(), Unneeded())  # type: ignore[arg-type]
    place = Partition("agent.turns", 0)
    seen.take([Lag("assembler", "run.assembler", place, 7, 10, 3), Lag("views", "run.views", place, 10, 10, 0)])
    assert [count for _, count in seen.turns] == [10]
    assert {role: [count for _, count in each] for role, each in seen.lag.items()} == {"assembler": [3], "views": [0]}
    assert seen.begun.is_set()


def test_a_process_is_weighed_with_all_that_it_started() -> None:
    assert tree(1, {1: [2, 3], 3: [4]}) == [1, 2, 3, 4]
    assert held_mb(0) == 0.0


@pytest.mark.parametrize(
    ("folder", "what"),
    [
        ("kafka/data/agent.turns-0", "topics"),
        ("kafka/data/weight-versions-0", "control topics"),
        ("kafka/data/__consumer_offsets-1", "the broker's own"),
        ("store/objects/turnlog/archive/soak", "archive"),
        ("logs", "logs"),
    ],
)
def test_a_folder_is_known_by_its_place(folder: str, what: str) -> None:
    assert lies(Path(folder)) == what
