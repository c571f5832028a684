"""How old is what waits: told from looks at the ends alone."""

from __future__ import annotations

from turnlog.consumers.lag import LOOKS, Ages, Lag, Open
from turnlog.infra.log import Partition

PLACE = Partition("tasks", 0)


def lag(taken: int, end: int, role: str = "runner") -> Lag:
    return Lag(role, f"run.{role}", PLACE, taken, end, end - taken)


def test_the_age_is_that_of_the_first_look_which_saw_what_nobody_took() -> None:
    ages = Ages()
    assert ages.look([lag(0, 0)], 10.0) == {"runner": 0.0}
    assert ages.look([lag(0, 2)], 20.0) == {"runner": 0.0}
    assert ages.look([lag(0, 5)], 30.0) == {"runner": 10.0}
    assert ages.look([lag(2, 5)], 40.0) == {"runner": 10.0}, "the first two are taken, the others came by 30"
    assert ages.look([lag(5, 5)], 50.0) == {"runner": 0.0}
    assert ages.look([lag(5, 6)], 60.0) == {"runner": 0.0}


def test_each_role_has_its_own_age_of_a_partition_that_several_read() -> None:
    ages = Ages()
    ages.look([lag(0, 1), lag(1, 1, "views")], 1.0)
    assert ages.look([lag(0, 1), lag(1, 1, "views")], 5.0) == {"runner": 4.0, "views": 0.0}


def test_a_role_that_never_comes_costs_no_more_memory_than_its_looks() -> None:
    ages = Ages()
    for look in range(3 * LOOKS):
        found = ages.look([lag(0, look + 1)], float(look))
    assert found == {"runner": LOOKS - 1}
    assert sum(map(len, ages._seen.values())) == LOOKS


def test_a_transaction_hangs_for_as_long_as_what_is_committed_ends_at_one_place() -> None:
    held = Open()
    other = Partition("runs", 0)
    assert held.look({PLACE: 5, other: 1}, {PLACE: 9, other: 1}, 10.0) == {"tasks": 0.0, "runs": 0.0}
    assert held.look({PLACE: 5, other: 1}, {PLACE: 9, other: 1}, 14.0) == {"tasks": 4.0, "runs": 0.0}
    assert held.look({PLACE: 7, other: 1}, {PLACE: 9, other: 1}, 15.0)["tasks"] == 0.0, "it ended, another began"
    assert held.look({PLACE: 9, other: 1}, {PLACE: 9, other: 1}, 16.0)["tasks"] == 0.0
    assert held.look({PLACE: 9, other: 1}, {PLACE: 12, other: 1}, 20.0)["tasks"] == 0.0
