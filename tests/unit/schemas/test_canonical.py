"""The bytes of canonical JSON, on which ids and hashes depend, for values in which encoders differ."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import orjson
import pytest

from turnlog.schemas.canonical import canonical_json, canonical_text
from turnlog.schemas.ids import environment_digest

PLAIN: list[Any] = [
    None, True, 0, -(2**63), 2**64 - 1, -0.0, 1.0, 0.1, 1e15, 1e16, 1e17, 1e22, 1e-4, 1e-5, 1e-7, 5e-324,
    1.7976931348623157e308, "", "é", "\u2028", "\x7f", "\x00\n\t\"\\/", "😀", [], {}, [[], {}],
    {"b": [1, {"é": 2, "z": 3.5}], "a": {"B": None, "A": {"y": [], "x": {}}}},
    {"😀": 1, "\uffff": 2, "é": 3, "z": 4, "A": 5, "": 6}, {"10": 1, "9": 2, "1": 3},
]  # fmt: skip
ODD: list[Any] = [math.nan, math.inf, -math.inf, 2**64, -(2**70), "\ud800", {"\ud800": 1}, {True: 1, False: 2},
                  {2: "b", 10: "a"}, {None: 0}, {1.5: 1}, (1, (2,)), {"a": [{"b": math.nan}]}]  # fmt: skip
DEEP = json.loads('{"b":' * 300 + "1" + "}" * 300)


def outcome(encode: Any) -> Any:
    """What comes of it: the text, or the error's type."""
    try:
        return encode()
    except (TypeError, ValueError) as error:
        return type(error)


@pytest.mark.parametrize("value", [*PLAIN, *ODD, DEEP], ids=lambda value: ascii(value)[:40])
def test_each_form_has_the_bytes_that_its_encoder_always_wrote(value: Any) -> None:
    def written(**options: Any) -> Any:
        return outcome(lambda: json.dumps(value, sort_keys=True, **options).encode())

    def text(**options: bool) -> Any:
        return outcome(lambda: canonical_text(value, **options).encode())

    compact = (",", ":")
    assert text(spaces=True) == written()
    assert text() == written(separators=compact)
    assert text(ascii_only=False) == written(separators=compact, ensure_ascii=False)
    assert text(ascii_only=False, nan=False) == written(separators=compact, ensure_ascii=False, allow_nan=False)
    assert outcome(lambda: canonical_json(value)) == outcome(lambda: orjson.dumps(value, option=orjson.OPT_SORT_KEYS))


def test_the_forms_are_these_bytes() -> None:
    value = {"é": [1, 1e-7, 1.0], "a": {"d": None, "c": "\u2028"}}
    assert canonical_text(value, spaces=True) == '{"a": {"c": "\\u2028", "d": null}, "\\u00e9": [1, 1e-07, 1.0]}'
    assert canonical_text(value) == '{"a":{"c":"\\u2028","d":null},"\\u00e9":[1,1e-07,1.0]}'
    assert canonical_text(value, ascii_only=False) == '{"a":{"c":"\u2028","d":null},"é":[1,1e-07,1.0]}'
    assert canonical_json(value).decode() == '{"a":{"c":"\u2028","d":null},"é":[1,1e-7,1.0]}'
    assert canonical_json(math.nan) == b"null"
    digest = hashlib.sha256('{"a":{"c":"\u2028","d":null},"é":[1,1e-07,1.0]}'.encode()).hexdigest()
    assert environment_digest(value) == digest


def test_the_order_of_keys_is_no_part_of_it() -> None:
    one, other = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    assert canonical_json(one) == canonical_json(other)
    assert canonical_text(one) == canonical_text(other)
