"""How deep JSON is nested, told before a parser recurses: one limit at every door, in the folds and for policies.

orjson reads 1,024 levels and writes 254; `json` follows as many as the stack of its caller has left. Within MAX_DEPTH
whatever was read can be written, and every reader of the log reads it, whatever it is called from.
"""

from __future__ import annotations

from typing import Final

import numpy as np

MAX_DEPTH: Final = 254
"""Arrays and objects inside one another, at most."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_OTHERS = bytes(set(range(256)) - set(b"[{]}"))


def deeper_than(text: str | bytes, levels: int = MAX_DEPTH) -> bool:
    """Whether a parser of this JSON (UTF-8) would come to more than `levels` arrays and objects inside one another,
    before it ends or meets what is no JSON. Linear in its length."""
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if raw.count(b"[") + raw.count(b"{") <= levels:
        return False
    outside = raw.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]
    steps = np.frombuffer(b"".join(outside).translate(_STEPS, _OTHERS), dtype=np.int8)
    return bool(np.cumsum(steps, dtype=np.int32).max(initial=0) > levels)
