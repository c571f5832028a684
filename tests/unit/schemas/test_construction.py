"""A record made by its twin is the record that its class makes."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from tests.each import each
from turnlog.schemas.binary import constructor, twin
from turnlog.schemas.events import ALL, FinishReason, TreeNode, VersionSpan
from turnlog.schemas.releases import example
from turnlog.schemas.types import TurnId


@each("name", ALL)
def test_every_event_is_made_as_its_class_makes_it(name: str) -> None:
    event = example(ALL[name])
    values = [getattr(event, field.name) for field in dataclasses.fields(event)]
    made = constructor(ALL[name])(*values)
    assert type(made) is ALL[name]
    assert made == event
    assert repr(made) == repr(event)


def test_what_is_made_is_frozen_hashable_and_can_be_copied() -> None:
    node = constructor(TreeNode)(TurnId("e", 0), None, 0, 3, 2, 1, 1, FinishReason.stop)
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.lineage = 1
    assert {node: 1}[pickle.loads(pickle.dumps(node))] == 1
    assert dataclasses.replace(copy.copy(node), lineage=4).lineage == 4


def test_a_constructor_takes_every_field_in_its_place() -> None:
    with pytest.raises(TypeError, match="kv_version"):
        constructor(VersionSpan)(1, 2)


def test_a_class_that_checks_its_fields_has_no_twin() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Positive:
        value: int

        def __post_init__(self) -> None:
            assert self.value > 0

    class Plain:
        value: int

    for record in (Positive, Plain):
        with pytest.raises(TypeError, match="no slotted dataclass"):
            twin(record)
