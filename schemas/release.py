"""Cut the next release of the schemas: `python -m turnlog.schemas.release`, or `turnlog schemas release`.

For each record that is new or has changed since the last release it writes the schema, golden bytes and what they say
into `released/vN/`. It refuses what breaks a rule of releases.py, and touches no older folder.

ReleaseRefused    a rule is broken: keep the field, or give it a default
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from turnlog.names import ExitStatus
from turnlog.schemas.avsc import field_types, render, stored_schema
from turnlog.schemas.codec import Codec
from turnlog.schemas.compatibility import Problem, Rule
from turnlog.schemas.errors import SchemaError
from turnlog.schemas.events import ALL
from turnlog.schemas.releases import SUMS, Release, altered, changed, problems, releases, sha256
from turnlog.schemas.types import Logical, pack_float32s, pack_int32s

FOLDER = Path(__file__).resolve().parent / "released"
PACKED = {
    "turnlog-int32-le": pack_int32s([0, 338, 383, 2**31 - 1]),
    "turnlog-float32-le": pack_float32s([-0.125, -2.5, 0.0]),
    "turnlog-json": '{"role":"assistant","content":"5 × 7 = 35"}'.encode(),
}


class ReleaseRefused(SchemaError):
    """What was released forbids it; every reason is told."""


def check(past: Sequence[Release]) -> list[Problem]:
    """Every rule over today's schemas: resolution, enums, packing, the folders' files, and their golden bytes."""
    found = problems({name: stored_schema(name) for name in ALL}, past)
    return [*found, *(problem for release in past for problem in (*altered(release), *_unreadable(release)))]


def cut(folder: Path = FOLDER) -> tuple[str, list[str]]:
    """Write the next release: its name and its records; ("", []) when nothing has changed. Raises ReleaseRefused."""
    past = releases(folder)
    if found := check(past):
        raise ReleaseRefused("; ".join(f"{problem} (rule {problem.rule})" for problem in found))
    names = changed(past)
    if not names:
        return "", []
    number = int(past[-1].name[1:]) + 1 if past else 1
    release = folder / f"v{number}"
    release.mkdir(parents=True)
    codec = Codec({name: 100 * number + place for place, name in enumerate(sorted(ALL))})
    for name in names:
        event = example(ALL[name])
        (release / f"{name}.avsc").write_text(render(ALL[name]))
        (release / f"{name}.bin").write_bytes(codec.encode(event))
        (release / f"{name}.json").write_text(json.dumps(told(event), indent=2, ensure_ascii=False) + "\n")
    write_sums(release)
    return release.name, names


def write_sums(release: Path) -> None:
    """SHA256SUMS over every file of a release, as sha256sum(1) reads it."""
    files = sorted(path for path in release.iterdir() if path.name != SUMS)
    (release / SUMS).write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files))


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


def golden_codec(release: Release) -> Codec:
    """Holds the schemas of a release under the ids that stand in its golden bytes."""
    codec = Codec({})
    for name in release.records:
        codec.hold(int.from_bytes(release.golden(name)[0][1:5], "big"), release.schema(name))
    return codec


def contains(value: Any, said: Any) -> bool:
    """Whether `value` still says all that `said` does; records may have gained fields since."""
    if isinstance(said, dict) and isinstance(value, dict):
        return all(name in value and contains(value[name], inner) for name, inner in said.items())
    if isinstance(said, list) and isinstance(value, list):
        return len(value) == len(said) and all(map(contains, value, said))
    return bool(value == said)


def _unreadable(release: Release) -> list[Problem]:
    codec, found = golden_codec(release), []
    for name in release.records:
        framed, said = release.golden(name)
        try:
            why = "" if contains(told(codec.decode(framed)), said) else "reads as another record than it was"
        except SchemaError as error:
            why = str(error)
        if why:
            found.append(Problem(f"{release.name}/{name}.bin", Rule.golden_unreadable, why))
    return found


def _record(record: Any, count: itertools.count[int]) -> Any:
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


def run(action: str, folder: Path | None = None) -> int:
    """`turnlog schemas check|release`: print what was found; 1 for a broken rule."""
    past = releases(folder)
    if action == "release":
        name, names = cut(folder or FOLDER)
        print(f"{name}: {', '.join(names)}" if name else "nothing has changed since the last release")
        return 0
    found = check(past)
    for problem in found:
        print(f"{problem} (rule {problem.rule})")
    if not found:
        print(f"today's schemas may follow {', '.join(release.name for release in past) or 'nothing: no release yet'}")
    print(f"unreleased: {', '.join(changed(past)) or 'none'}")
    return ExitStatus.DIFFERS if found else ExitStatus.DONE


if __name__ == "__main__":
    raise SystemExit(run("release"))
