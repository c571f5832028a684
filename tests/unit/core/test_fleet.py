"""Which engines a run has, by what was asked and what loaders say."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from turnlog.processors.core.fleet import AUTOSCALE, GONE, OPERATOR, SERVING, SETTINGS, Fleet
from turnlog.schemas.events import EngineGone, EngineRegistered


def asked(fleet: Fleet, *changes: tuple[str, str], by: str = OPERATOR, url: str = "") -> None:
    for engine_id, wanted in changes:
        fleet.apply(fleet.request(engine_id, wanted, run_id="r", by=by, url=url))


def said(fleet: Fleet, engine_id: str, state: str = "serving", version: int = 0, url: str = "http://e") -> None:
    of: dict[str, Any] = {"event_id": "", "run_id": "r", "engine_id": engine_id, "url": url, "version": version}
    event = EngineGone(**of, state=GONE, cause="drained") if state == GONE else EngineRegistered(
        **of, state=state, model="m"
    )  # fmt: skip
    fleet.apply(event)


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=12))
def test_after_any_scaling_as_many_are_hosted_and_no_number_is_used_while_its_last_engine_is_there(
    steps: list[tuple[int, bool]],
) -> None:
    fleet, there = Fleet(), {"engine-0"}
    asked(fleet, ("engine-0", SERVING), by=SETTINGS)
    for count, all_leave in steps:
        before = {engine.id for engine in fleet.hosted_engines()}
        changes = fleet.plan_scaling(count)
        came = {name for name, wanted in changes if wanted == SERVING}
        assert not came & there, "a number is free once whoever had it has gone"
        asked(fleet, *changes)
        for name in came:
            said(fleet, name)
        there |= came
        hosted = {engine.id for engine in fleet.hosted_engines()}
        assert len(hosted) == count
        assert len(hosted ^ before) == abs(count - len(before)), "no engine goes for another one to come"
        if all_leave:
            for name in there - hosted:
                said(fleet, name, GONE)
            there &= hosted
        assert not fleet.plan_scaling(count)


@given(st.permutations(range(6)))
def test_requests_and_reports_may_be_folded_in_any_order_of_the_two_topics(order: list[int]) -> None:
    """Each topic in its own order."""
    fleets = [Fleet(), Fleet()]
    kinds = sorted(range(6), key=lambda at: order.index(at)), range(6)
    for fleet, taken in zip(fleets, kinds, strict=True):
        requests = iter((SERVING, GONE, SERVING))
        reports = iter((("starting", -1), ("serving", 3), (GONE, 3)))
        for at in taken:
            if at % 2:
                asked(fleet, ("engine-0", next(requests)))
            else:
                said(fleet, "engine-0", *next(reports))
    assert fleets[0].engines == fleets[1].engines


def test_settings_are_asked_for_once_and_count_below_what_anybody_else_said() -> None:
    fleet = Fleet()
    two = [("engine-0", ""), ("engine-1", "")]
    assert fleet.compare_settings(two) == [("engine-0", "", SERVING), ("engine-1", "", SERVING)]
    asked(fleet, ("engine-0", SERVING), ("engine-1", SERVING), by=SETTINGS)
    assert fleet.compare_settings(two) == []
    assert fleet.compare_settings(two[:1]) == [("engine-1", "", GONE)]
    asked(fleet, ("engine-0", GONE), ("engine-2", SERVING))
    assert fleet.compare_settings(two) == [], "what an operator drained stays away, what he asked for stays"
    asked(fleet, ("engine-1", GONE), by=AUTOSCALE)
    assert fleet.compare_settings(two) == []
    other = [("engine-2", "http://one")]
    assert fleet.compare_settings(other) == [("engine-2", "http://one", SERVING)], "it is the user's own from now on"


def test_an_engine_is_found_by_name_or_address_and_one_that_stays_before_one_that_left() -> None:
    fleet = Fleet()
    asked(fleet, ("old", SERVING), ("old", GONE), url="http://a:1")
    asked(fleet, ("new", SERVING), url="http://a:1")
    assert [getattr(fleet.find_engine(name), "id", None) for name in ("http://a:1/", "old", "nobody")] == [
        "new",
        "old",
        None,
    ]
