"""Canonical JSON: keys are sorted, so that equal values have equal bytes.

Ids, hashes and stored objects depend on the bytes, so none of the forms may ever change. The two functions differ in
more than white space: orjson writes 1e-07 as 1e-7 and NaN as null, and rejects lone surrogates, integers beyond 64 bits
and keys that are not strings.
"""

from __future__ import annotations

import json

import orjson


def canonical_json(value: object) -> bytes:
    """Return UTF-8 without spaces, as orjson writes it. Raises TypeError."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def canonical_text(value: object, *, spaces: bool = False, ascii_only: bool = True, nan: bool = True) -> str:
    """Return text as the standard library writes it. Raises TypeError, and ValueError for NaN and infinity if not
    `nan`.
    """
    separators = None if spaces else (",", ":")
    return json.dumps(value, sort_keys=True, separators=separators, ensure_ascii=ascii_only, allow_nan=nan)
