"""How deep JSON is nested, without parsing it: for what is JSON, what is none, and what would end a parser's stack."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than, more_than

TEXTS = st.text(st.sampled_from('[]{}"\\ aé\ud800\n'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=30,
)


def levels(value: Any) -> int:
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    return 0 if inner is None else 1 + max(map(levels, inner), default=0)


@settings(deadline=None, database=None, derandomize=True)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_any_json_is_as_deep_as_its_arrays_and_objects_are_nested(
    value: Any, ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    deep = levels(value)
    assert not deeper_than(text, deep)
    assert deep == 0 or deeper_than(text, deep - 1)
    assert deeper_than(text.encode(errors="surrogatepass"), 1) == (deep > 1)


def held(value: Any) -> int:
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    return 1 if inner is None else 1 + (sum(map(held, inner)) if inner else 1)


@settings(deadline=None, database=None, derandomize=True)
@given(VALUES, st.booleans())
def test_any_json_holds_as_many_values_as_are_in_it(value: Any, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert not more_than(raw, held(value))
    assert more_than(raw, held(value) - 1)


@pytest.mark.parametrize("opened", ["[", '{"a":', '[{"a":'])
def test_what_nobody_closes_is_as_deep_as_it_was_opened(opened: str) -> None:
    assert deeper_than(opened * 5000)
    assert not deeper_than('"' + opened.replace('"', r"\"") * 5000)


def test_the_limit_is_what_the_gateways_json_can_write() -> None:
    deepest = orjson.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert not deeper_than(orjson.dumps(deepest))
    with pytest.raises(TypeError):
        orjson.dumps([deepest])
