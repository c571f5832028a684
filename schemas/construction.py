"""Making instances of frozen dataclasses fast.

A frozen dataclass sets each field by a call. Its twin, a class of the same slots, takes plain assignments, and then
its instance takes on the record's class: 0.5 instead of 6.3 us for the 26 fields of a TurnCompleted, 0.4 instead of 1.3
for the 8 of a TreeNode. For the few records of which there is one per turn.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

Record = TypeVar("Record")


@functools.cache
def twin(record: type) -> type:
    """A class of the same slots whose instances may take on `record` as their class. Raises TypeError for a class that
    is no slotted dataclass, or that checks its fields itself."""
    if not dataclasses.is_dataclass(record) or "__slots__" not in vars(record) or hasattr(record, "__post_init__"):
        raise TypeError(f"{record.__name__} is no slotted dataclass without checks of its own")
    names = tuple(field.name for field in dataclasses.fields(record))
    return type(f"{record.__name__}Twin", (), {"__slots__": names})


def constructor(record: type[Record]) -> Callable[..., Record]:
    """A function that makes a record of all its fields, in their order and without defaults."""
    names = [field.name for field in dataclasses.fields(record)]  # type: ignore[arg-type]
    lines = [f"def make({', '.join(names)}):", "    made = Twin()"]
    lines += [f"    made.{name} = {name}" for name in names]
    lines += ["    made.__class__ = Record", "    return made"]
    found: dict[str, Any] = {"Twin": twin(record), "Record": record}  # type: ignore[arg-type]
    exec(compile("\n".join(lines), f"<{__name__}.{record.__name__}>", "exec"), found)
    return found["make"]  # type: ignore[no-any-return]
