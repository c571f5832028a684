"""Which engines a run has, by what was asked and what loaders say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.processors.core.views.fleet import (
    AUTOSCALE,
    GONE,
    NO_WEIGHTS,
    OPERATOR,
    RELEASED,
    SERVING,
    SETTINGS,
    SILENT,
    AnsweredVersions,
    Fleet,
)
from turnlog.schemas.events import (
    EngineDraining,
    EngineGone,
    EngineRegistered,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    Event,
)


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


def test_settings_are_asked_for_again_only_if_the_address_of_an_engine_differs() -> None:
    fleet = Fleet()
    asked(fleet, ("own", SERVING), by=SETTINGS, url="http://one")
    asked(fleet, ("hosted", SERVING), by=SETTINGS)
    assert fleet.compare_settings([("own", "http://one"), ("hosted", "")]) == []
    assert fleet.compare_settings([("own", "http://two"), ("hosted", "")]) == [("own", "http://two", SERVING)]
    assert fleet.compare_settings([("own", ""), ("hosted", "")]) == [("own", "", SERVING)]


def test_an_engine_is_found_by_name_or_address_and_one_that_stays_before_one_that_left() -> None:
    fleet = Fleet()
    asked(fleet, ("old", SERVING), ("old", GONE), url="http://a:1")
    asked(fleet, ("new", SERVING), url="http://a:1")
    assert [getattr(fleet.find_engine(name), "id", None) for name in ("http://a:1/", "old", "nobody")] == [
        "new",
        "old",
        None,
    ]


def test_the_kind_of_a_registration_stays_until_the_next_one() -> None:
    fleet, found = Fleet(), []
    for wanted, kind in ((SERVING, "vllm"), (GONE, ""), (SERVING, "")):
        fleet.apply(fleet.request("engine-1", wanted, run_id="r", by=OPERATOR, url="http://e", kind=kind))
        found.append(fleet.engines["engine-1"].wanted_kind)
    assert found == ["vllm", "vllm", ""]


def report(kind: type[Event], version: int = 0, *, engine: str = "e", state: str = SERVING, **more: Any) -> Event:
    fields: dict[str, Any] = {"event_id": "", "run_id": "r", "engine_id": engine, "url": "http://e"}
    rest: dict[type[Event], dict[str, Any]] = {
        EngineRegistered: {"model": "m"},
        EngineWeightsLoaded: {"superseded": (), "seconds": {}},
        EngineWeightsRefused: {"refused_version": version + 1, "cause": "BadWeights", "message": ""},
        EngineGone: {"cause": "drained"},
    }
    return kind(**fields, version=version, state=state, **rest.get(kind, {}) | more)


REGISTERED = report(EngineRegistered, 1)
LOADED = report(EngineWeightsLoaded, 2, superseded=(1,), base_version=0)
REFUSED = report(EngineWeightsRefused, 2)
SILENCE = report(EngineDraining, 2, state=SILENT)
LENT = report(EngineDraining, 2, state=RELEASED, published=3)
LEFT = report(EngineGone, 2, state=GONE)


@pytest.mark.parametrize(
    ("reports", "serving", "acknowledged", "lent_at"),
    [
        ([REGISTERED], {"e": 1}, {"e": 1}, -1),
        ([REGISTERED, LOADED], {"e": 2}, {"e": 2}, -1),
        ([REGISTERED, LOADED, SILENCE], {}, {"e": 2}, -1),
        ([REGISTERED, LENT], {}, {"e": 1}, 3),
        ([REGISTERED, LENT, SILENCE], {}, {"e": 1}, 3),
        ([REGISTERED, LENT, REFUSED], {"e": 2}, {"e": 1}, -1),
        ([REGISTERED, LENT, LEFT], {}, {"e": NO_WEIGHTS}, None),
        ([REGISTERED, LEFT, SILENCE], {}, {"e": NO_WEIGHTS}, None),
        ([REGISTERED, LEFT, REGISTERED], {"e": 1}, {"e": 1}, -1),
        ([REFUSED], {"e": 2}, {}, -1),
        ([SILENCE], {}, {}, None),
        ([LENT], {}, {}, 3),
        ([LEFT], {}, {"e": NO_WEIGHTS}, None),
    ],
)
def test_each_kind_of_report_changes_what_the_queries_say(
    reports: list[Event], serving: dict[str, int], acknowledged: dict[str, int], lent_at: int | None
) -> None:
    fleet = Fleet()
    asked(fleet, ("requested", SERVING))
    for event in reports:
        fleet.apply(event)
    assert fleet.serving_versions() == serving
    assert fleet.acknowledged_versions() == acknowledged
    assert [bool(fleet.engines_holding_memory(published)) for published in (-1, 0, 3, 4)] == [
        lent_at is not None and lent_at < published for published in (-1, 0, 3, 4)
    ]
    assert fleet.engines["e"].state == reports[-1].state


def test_a_base_version_stays_until_the_next_weights() -> None:
    fleet, found = Fleet(), []
    for event in (LOADED, REFUSED, LENT, LEFT, REGISTERED):
        fleet.apply(event)
        found.append(fleet.reports["e"].base_version)
    assert found == [0, 0, 0, 0, None]


def test_versions_are_answered_once_loaded_refused_or_superseded_but_not_by_a_registration() -> None:
    versions = AnsweredVersions()
    for event in (report(EngineRegistered, -1), report(EngineRegistered, 0), LOADED, REFUSED, LENT, LEFT):
        versions.apply(event)
    assert (versions.registered, versions.loaded, versions.refused, versions.superseded) == ({0}, {2}, {3}, {1})
    assert [version for version in range(5) if versions.is_answered(version)] == [1, 2, 3]
