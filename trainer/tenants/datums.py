"""Datums: the rows of a call, checked, and as the columns that the trainer's network runs over.

A row has one token more than its datum, so that position i of the datum is predicted where the trainer predicts token
i + 1. The targets are a column of their own: a datum may ask for the log-prob of any token at any position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.tenants.errors import DatumIncomplete, DatumMisshapen, DatumNotFinite, DatumTokenUnknown
from turnlog.trainer.tenants.losses import TenantLoss

Integers = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """A row: `targets[i]` is scored after `tokens[: i + 1]`. Arrays of other types are converted."""

    tokens: Integers
    """[n] token ids, n >= 1."""
    targets: Integers
    """[n] token ids."""
    weights: Floats | None = None
    """[n] factor of each position's loss."""
    logprobs: Floats | None = None
    """[n] log-probs of the targets when they were sampled."""
    advantages: Floats | None = None
    """[n] advantages of the targets."""


INTEGERS, FLOATS = ("tokens", "targets"), ("weights", "logprobs", "advantages")


@dataclass(frozen=True, slots=True)
class DatumColumns:
    """The rows of a call. Token columns are aligned with the rows' token ids; each row's first entry is 0."""

    rows: BatchRows
    lengths: tuple[int, ...]
    """Number of positions of each datum."""
    shifted: bool
    """Whether every target is the token after its position, where there is one."""
    columns: dict[str, NDArray[Any]]
    """`targets` [T] int64; `weights`, `logprobs`, `advantages` [T] float32, where the datums have them."""

    def split(self, column: NDArray[np.float32]) -> list[Floats]:
        """Return the entries of each datum's positions."""
        ends = np.cumsum([length + 1 for length in self.lengths])
        return [column[end - length : end].copy() for end, length in zip(ends, self.lengths, strict=True)]


def lay_out_datums(datums: Sequence[Datum], loss: TenantLoss, shape: ModelShape) -> DatumColumns:
    """Return the columns of checked datums.

    Raises DatumIncomplete, DatumMisshapen, DatumTokenUnknown, DatumNotFinite.
    """
    if not datums:
        raise DatumMisshapen(None, "datums", "has no datum")
    checked = [_check(index, datum, loss, shape) for index, datum in enumerate(datums)]
    lengths = tuple(len(one["tokens"]) for one in checked)
    first_int, first_float = np.zeros(1, np.int64), np.zeros(1, np.float32)
    columns: dict[str, NDArray[Any]] = {
        "targets": np.concatenate([part for one in checked for part in (first_int, one["targets"])])
    }
    for name in FLOATS:
        if any(name in one for one in checked):
            fill = 1.0 if name == "weights" else 0.0
            parts = [one[name] if name in one else np.full(len(one["tokens"]), fill, np.float32) for one in checked]
            columns[name] = np.concatenate([entry for part in parts for entry in (first_float, part)])
    shifted = all(np.array_equal(one["tokens"][1:], one["targets"][:-1]) for one in checked)
    return DatumColumns(_rows(checked, lengths), lengths, shifted, columns)


def _check(index: int, datum: Datum, loss: TenantLoss, shape: ModelShape) -> dict[str, NDArray[Any]]:
    """Return the datum's fields: integers as int64, numbers as float32."""
    found: dict[str, NDArray[Any]] = {}
    for name in (*INTEGERS, *FLOATS):
        value = getattr(datum, name)
        if value is None:
            if name in INTEGERS or name in loss.inputs:
                raise DatumIncomplete(index, name, "is missing, and the loss needs it")
            continue
        array = _as_array(index, name, value)
        if name != "tokens" and len(array) != len(found["tokens"]):
            raise DatumMisshapen(index, name, f"has {len(array)} entries, tokens has {len(found['tokens'])}")
        convert = _as_tokens if name in INTEGERS else _as_numbers
        found[name] = convert(index, name, array, shape.vocabulary)
    if not 1 <= len(found["tokens"]) <= shape.positions:
        raise DatumMisshapen(
            index, "tokens", f"has {len(found['tokens'])} entries, the model takes 1 to {shape.positions}"
        )
    return found


def _as_array(index: int, name: str, value: object) -> NDArray[Any]:
    """Return a field as an array of one dimension. Raises DatumMisshapen."""
    try:
        array: NDArray[Any] = np.asarray(value)
    except ValueError as error:
        raise DatumMisshapen(index, name, f"is no array: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in ("iu" if name in INTEGERS else "iuf"):
        wanted = "integers" if name in INTEGERS else "numbers"
        raise DatumMisshapen(index, name, f"is {array.dtype} of shape {array.shape}, it must be a list of {wanted}")
    return array


def _as_tokens(index: int, name: str, array: NDArray[Any], vocabulary: int) -> NDArray[np.int64]:
    """Return token ids. Raises DatumTokenUnknown."""
    unknown = (array < 0) | (array >= vocabulary)
    if unknown.any():
        at = int(unknown.argmax())
        raise DatumTokenUnknown(
            index, name, f"has token {int(array[at])} at position {at}; the model has tokens 0 to {vocabulary - 1}"
        )
    return array.astype(np.int64)


def _as_numbers(index: int, name: str, array: NDArray[Any], _: int) -> Floats:
    """Return float32 numbers. Raises DatumNotFinite."""
    with np.errstate(over="ignore"):
        numbers = array.astype(np.float32)
    finite = np.isfinite(numbers)
    if not finite.all():
        at = int(finite.argmin())
        raise DatumNotFinite(index, name, f"is {array[at]} at position {at}, it must be finite in float32")
    return numbers


def _rows(checked: Sequence[dict[str, NDArray[Any]]], lengths: Sequence[int]) -> BatchRows:
    """Return the rows: a datum's tokens and its last target. All but the first token of each train."""
    count, total = len(lengths), sum(lengths) + len(lengths)
    names = tuple(map(str, range(count)))
    trained = np.ones(total, np.uint8)
    trained[np.cumsum([0, *(length + 1 for length in lengths[:-1])])] = 0
    zeros = np.zeros(total, np.float32)
    return BatchRows(
        sample_ids=names,
        group_ids=names,
        session_ids=names,
        rollout_index=np.zeros(count, np.int32),
        segment_index=np.zeros(count, np.int32),
        lengths=np.asarray(lengths, np.int32) + np.int32(1),
        token_ids=np.concatenate([part for one in checked for part in (one["tokens"], one["targets"][-1:])]).astype(
            "<i4"
        ),
        trained=trained,
        logprobs=zeros,
        advantages=zeros,
        weight_divisor=np.ones(count, np.int64),
        temperature=np.ones(count, np.float32),
        rewards=np.zeros(count, np.float32),
        version_min=np.full(count, -1, np.int32),
        version_max=np.full(count, -1, np.int32),
    )
