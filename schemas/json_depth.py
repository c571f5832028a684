"""Depth and size of JSON, measured before a parser recurses or fills the memory. The same depth limit applies at every
entry point, in the folds and for trajectory rules.

orjson reads 1,024 levels and writes 254; `json` follows as many as its caller's stack has left. Up to MAX_DEPTH,
everything that was read can be written, and every reader of the log can read it, however deep its own stack is.
"""

from __future__ import annotations

from typing import Final

import numpy as np

MAX_DEPTH: Final = 254
"""Maximum depth of arrays and objects inside one another."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_BEGINS = (b"[", b"{", b",")
"""Characters that each precede at most one value; the first value has none."""
_OTHERS = bytes(set(range(256)) - set(b"[{]}"))


def deeper_than(text: str | bytes, levels: int = MAX_DEPTH) -> bool:
    """Return True if a parser of this JSON (UTF-8) would reach more than `levels` nested arrays and objects before the
    text ends or stops being JSON. Takes time linear in its length."""
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if raw.count(b"[") + raw.count(b"{") <= levels:
        return False
    steps = np.frombuffer(_outside_strings(raw).translate(_STEPS, _OTHERS), dtype=np.int8)
    return bool(np.cumsum(steps, dtype=np.int32).max(initial=0) > levels)


def more_than(raw: bytes, values: int) -> bool:
    """Return True if this JSON (UTF-8) holds more than `values` values, without creating an object for each. An empty
    array or object counts as two. Takes time linear in its length."""
    return 1 + sum(map(raw.count, _BEGINS)) > values and 1 + sum(map(_outside_strings(raw).count, _BEGINS)) > values


def _outside_strings(raw: bytes) -> bytes:
    found = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), dtype=np.uint8)
    return found[~np.logical_xor.accumulate(found == ord('"'))].tobytes()
