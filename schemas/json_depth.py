"""How deep JSON is nested and how much is in it, told before a parser recurses or fills the memory: one limit of depth
at every door, in the folds and for policies.

orjson reads 1,024 levels and writes 254; `json` follows as many as the stack of its caller has left. Within MAX_DEPTH
whatever was read can be written, and every reader of the log reads it, whatever it is called from.
"""

from __future__ import annotations

from typing import Final

import numpy as np

MAX_DEPTH: Final = 254
"""Arrays and objects inside one another, at most."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_BEGINS = (b"[", b"{", b",")
"""Each stands before one value at most; the first value has none."""
_OTHERS = bytes(set(range(256)) - set(b"[{]}"))


def deeper_than(text: str | bytes, levels: int = MAX_DEPTH) -> bool:
    """Whether a parser of this JSON (UTF-8) would come to more than `levels` arrays and objects inside one another,
    before it ends or meets what is no JSON. Linear in its length."""
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if raw.count(b"[") + raw.count(b"{") <= levels:
        return False
    steps = np.frombuffer(_outside_strings(raw).translate(_STEPS, _OTHERS), dtype=np.int8)
    return bool(np.cumsum(steps, dtype=np.int32).max(initial=0) > levels)


def more_than(raw: bytes, values: int) -> bool:
    """Whether this JSON (UTF-8) holds more than `values` values, told before a parser makes an object of each; an empty
    array or object counts as two. Linear in its length."""
    return 1 + sum(map(raw.count, _BEGINS)) > values and 1 + sum(map(_outside_strings(raw).count, _BEGINS)) > values


def _outside_strings(raw: bytes) -> bytes:
    found = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), dtype=np.uint8)
    return found[~np.logical_xor.accumulate(found == ord('"'))].tobytes()
