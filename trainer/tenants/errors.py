"""Errors of tenants' calls. A call that raises one has changed nothing, and every rank raises the same.

They are answers to whoever made the call, and no reason to end the process, unlike turnlog.trainer.TrainerError.

TenantError
├── UnknownTenant        there is no tenant of this name
├── TenantExists         there is a tenant of this name already
├── RankTooLarge         an adapter's rank is above the learner's max_rank
├── UnknownLoss          there is no loss of this name
├── InvalidArgument      an argument of a loss or of the optimizer is unknown or out of its range
├── DatumError           a datum cannot be used; it has the datum's index and the field
│   ├── DatumIncomplete      it lacks an input of the loss
│   ├── DatumMisshapen       a field has another length than the tokens, or there are more tokens than positions
│   ├── DatumTokenUnknown    a token id is not in the vocabulary
│   └── DatumNotFinite       a number is infinite or NaN: an input's, the loss's, or the gradient's
└── SavedUnusable        a saved adapter or a snapshot is missing, damaged, or of another model or adapter
"""

from __future__ import annotations


class TenantError(Exception):
    """Base of the errors above."""


class UnknownTenant(TenantError):
    """There is no such tenant. The message names it."""


class TenantExists(TenantError):
    """There is such a tenant already. The message names it."""


class RankTooLarge(TenantError):
    """The rank is above max_rank. The message names both."""


class UnknownLoss(TenantError):
    """There is no such loss. The message names those that there are."""


class InvalidArgument(TenantError):
    """An argument cannot be used. The message names it and its range."""


class DatumError(TenantError):
    """A datum cannot be used."""

    def __init__(self, datum: int | None, field: str, reason: str) -> None:
        """`datum` is its index in the call, None if the fault is not of one datum."""
        super().__init__(f"datum {datum}: {field} {reason}" if datum is not None else f"{field} {reason}")
        self.datum, self.field = datum, field


class DatumIncomplete(DatumError):
    """A datum lacks an input."""


class DatumMisshapen(DatumError):
    """A field of a datum has the wrong length or type."""


class DatumTokenUnknown(DatumError):
    """A token id is not in the vocabulary."""


class DatumNotFinite(DatumError):
    """A number is not finite."""


class SavedUnusable(TenantError):
    """The saved files cannot be used. The message names the folder and the reason."""
