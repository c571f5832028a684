"""Ids name what a record is about: the same on every machine, apart for everything apart."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.schemas import ids
from turnlog.schemas.events import Purpose

GOLDEN = [
    "0dc9bca419bc9585e0f1eedd00c91979",
    "9658275fcdfa75f0217572d944fc36a5",
    "fd3257658133dce0ad5efe599ec3c299",
    "caea073e0272ec20c11443b851cf00d4",
    "a0bbe25aa95360c8f595948b06907598",
    "59709baf0167bd8710ca9104b946142c",
    "1b5fc2ebbf48e6ec5311b5a0fb53c13d",
]
PARTS = st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=8)), max_size=4).map(tuple)


def test_an_id_is_the_first_half_of_sha256_over_canonical_json() -> None:
    assert ids.digest("gröup", 1, None) == hashlib.sha256('["gröup",1,null]'.encode()).hexdigest()[:32]


@given(st.lists(st.one_of(st.none(), st.booleans(), st.integers(), st.text())).map(tuple))
def test_the_json_is_that_of_the_standard_library(parts: tuple[Any, ...]) -> None:
    text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
    assert ids.digest(*parts) == hashlib.sha256(text.encode()).hexdigest()[:32]


def test_an_enum_is_its_value() -> None:
    assert ids.digest(Purpose.train, 1) == ids.digest("train", 1)


def test_ids_are_what_they_were() -> None:
    group = ids.group_id("run", "task", 0)
    rollout = ids.rollout_id(group, 3)
    session = ids.session_id(rollout, 1)
    assert [
        group,
        rollout,
        session,
        ids.turn_event_id("TurnCompleted", session, "epoch", 2),
        ids.call_id(session, "epoch", 2, 0, "agent"),
        ids.sample_id(session, 0),
        ids.dead_letter_id("tasks", 1, 2),
    ] == GOLDEN


@given(PARTS, PARTS)
def test_two_ids_are_equal_only_for_equal_parts(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert (ids.digest(*one) == ids.digest(*other)) == (one == other)


@pytest.mark.parametrize(("one", "other"), [(("1",), (1,)), (("a", "b"), ("ab",)), ((None,), ("null",)), ((), ("",))])
def test_confusable_parts_give_different_ids(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert ids.digest(*one) != ids.digest(*other)


@pytest.mark.parametrize("part", [1.5, b"bytes", ["list"], {"a": 1}])
def test_what_json_would_not_keep_apart_is_refused(part: Any) -> None:
    with pytest.raises(TypeError, match=type(part).__name__):
        ids.digest("x", part)


def test_every_kind_of_id_differs_for_the_same_parts() -> None:
    made = [ids.rollout_id("x", 1), ids.session_id("x", 1), ids.sample_id("x", 1)]
    assert len(set(made)) == len(made)
