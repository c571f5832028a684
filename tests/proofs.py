"""Features of model families, and the tests that prove them. docs/tools/models_table.py reads these marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.each import each
from tests.reference.small_models import SMALL
from turnlog.trainer.families.family import family

SETTINGS = {"packing": "packing", "LoRA": "lora_rank"}
"""Feature -> the [trainer] setting by which a family refuses it."""


def families_with(feature: str) -> list[str]:
    """Return the model_types with whose small models `each_family(feature)` runs a test."""
    return [
        kind
        for kind, shape in SMALL.items()
        if SETTINGS.get(feature) not in family(kind).without
        and (feature != "router replay" or shape.mixture)
        and (feature != "served on CPU" or not (shape.vision or family(kind).blind))
    ]


def each_family(feature: str, *, apart: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that runs a test with the small model `shape` of every family that has the feature. `apart`:
    each family is a test of its own, with fixtures and a time limit of its own."""
    kinds = families_with(feature)
    shapes = [SMALL[kind] for kind in kinds]
    return pytest.mark.parametrize("shape", shapes, ids=kinds) if apart else each("shape", shapes, ids=kinds)
