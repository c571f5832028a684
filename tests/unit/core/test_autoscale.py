"""How many engines a load asks for."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from turnlog.processors.core.views.fleet import PATIENCE, Autoscale, AutoscaleRules

RULES = st.builds(
    lambda least, more, requests, after_s: AutoscaleRules(least, least + more, requests, after_s),
    st.integers(1, 4), st.integers(0, 6), st.integers(1, 32), st.floats(1, 60),
)  # fmt: skip


def counts(rules: AutoscaleRules, hosted: int, loads: list[int], every_s: float) -> list[int]:
    """Engines after each look, where every one that is asked for serves at the next."""
    scaling, found = Autoscale(rules), [hosted]
    for number, load in enumerate(loads):
        found.append(scaling.look(number * every_s, hosted=found[-1], serving=found[-1], under_way=load))
    return found


@given(RULES, st.integers(0, 12), st.lists(st.integers(0, 500), max_size=60), st.floats(0.1, 100))
def test_the_bounds_hold_after_one_look_and_engines_leave_one_by_one(
    rules: AutoscaleRules, hosted: int, loads: list[int], every_s: float
) -> None:
    first, *later = counts(rules, hosted, [0, *loads], every_s)[1:]
    assert all(rules.least <= count <= rules.most for count in (first, *later))
    pairs = zip((first, *later), later, strict=False)
    assert all(after >= before - 1 for before, after in pairs)


@given(RULES, st.integers(0, 12), st.integers(0, 500))
def test_a_steady_load_leads_to_one_number_that_is_enough_and_stays(
    rules: AutoscaleRules, hosted: int, load: int
) -> None:
    every_s = rules.after_s
    found = counts(rules, hosted, [load] * 100, every_s)[1:]
    rises = [after > before for before, after in itertools.pairwise(found) if after != before]
    assert len(set(rises)) <= 1, "it never goes to and fro"
    assert len(set(found[-20:])) == 1
    assert found[-1] == rules.most or load <= rules.requests * found[-1]
    assert found[-1] == rules.least or load > 0.5 * rules.requests * (found[-1] - 1)


@given(RULES, st.integers(1, 30), st.booleans())
def test_what_soon_passes_changes_nothing(rules: AutoscaleRules, looks: int, high: bool) -> None:
    middle = (rules.least + rules.most) // 2
    calm = math.ceil(0.75 * rules.requests * middle)
    odd = 10_000 if high else 0
    most = rules.after_s * (1 if high else PATIENCE)
    every_s = most / looks * 0.999
    assert set(counts(rules, middle, ([odd] * looks + [calm]) * 3, every_s)) == {middle}


@given(RULES, st.integers(0, 500))
def test_nothing_is_decided_while_an_engine_is_on_its_way(rules: AutoscaleRules, load: int) -> None:
    scaling = Autoscale(rules)
    for number in range(20):
        assert scaling.look(number * 1e3, hosted=rules.least, serving=rules.least - 1, under_way=load) == rules.least
