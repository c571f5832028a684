"""Write the golden bytes of every record that has none yet: `python tests/golden/write.py`.

For each record of a released version three files stay in the repo for ever: the schema it was written with (.avsc), the
framed bytes (.bin) and what they say (.json). Files that exist are never rewritten: a record that was released must
decode for ever. To release a changed record, give VERSION the next name and run the script.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from turnlog.schemas.avsc import field_types, render
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import ALL
from turnlog.schemas.types import Logical, pack_float32s, pack_int32s

FOLDER = Path(__file__).parent
VERSION = "v1"
PACKED = {
    "turnlog-int32-le": pack_int32s([0, 338, 383, 2**31 - 1]),
    "turnlog-float32-le": pack_float32s([-0.125, -2.5, 0.0]),
    "turnlog-json": '{"role":"assistant","content":"5 × 7 = 35"}'.encode(),
}


def example(record: type) -> Any:
    """An event with every optional field set and every other arm of its unions taken in turn; the same each time."""
    count = itertools.count(1)
    return _record(record, count)


def told(value: Any) -> Any:
    """An event as JSON: bytes as {"hex": ...}, enums as their symbols."""
    if dataclasses.is_dataclass(value):
        return {field.name: told(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [told(item) for item in value]
    if isinstance(value, dict):
        return {key: told(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return value.value if isinstance(value, Enum) else value


def _record(record: type, count: itertools.count[int]) -> Any:
    return record(**{name: _value(name, kind, count) for name, kind in field_types(record).items()})


def _value(name: str, kind: Any, count: itertools.count[int]) -> Any:
    origin, number = get_origin(kind), next(count)
    if origin is Annotated:
        logical = get_args(kind)[1]
        assert isinstance(logical, Logical)
        return PACKED[logical.name]
    if origin in (Union, UnionType):
        arms = [arm for arm in get_args(kind) if arm is not NoneType]
        return _value(name, arms[number % len(arms)], count)
    if origin is tuple:
        return tuple(_value(name, get_args(kind)[0], count) for _ in range(2))
    if origin is dict:
        return {key: _value(name, get_args(kind)[1], count) for key in ("first", "second")}
    if dataclasses.is_dataclass(kind):
        return _record(kind, count)
    if issubclass(kind, Enum):
        members = list(kind)
        return members[number % len(members)]
    return _scalar(name, kind, number)


def _scalar(name: str, kind: type, number: int) -> Any:
    match kind.__name__:
        case "str":
            return f"{name}-{number}"
        case "bytes":
            return bytes([0, number % 256, 255])
        case "bool":
            return number % 2 == 1
        case "float":
            return number / 8
        case "int":
            return number if number % 5 else -number
        case other:
            raise TypeError(f"{name}: no example for {other}")


def write(folder: Path) -> list[str]:
    """Write the records that `folder` lacks; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    codec = Codec({name: 100 + place for place, name in enumerate(sorted(ALL))})
    missing = [name for name in ALL if not (folder / f"{name}.bin").exists()]
    for name in missing:
        event = example(ALL[name])
        (folder / f"{name}.avsc").write_text(render(ALL[name]))
        (folder / f"{name}.bin").write_bytes(codec.encode(event))
        (folder / f"{name}.json").write_text(json.dumps(told(event), indent=2, ensure_ascii=False) + "\n")
    return missing


if __name__ == "__main__":
    print(f"wrote {', '.join(write(FOLDER / VERSION)) or 'nothing: every record has its golden bytes'}")
