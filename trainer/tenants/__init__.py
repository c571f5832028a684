"""Tenants: many low-rank adapters that train over one base model, each with its own gradients and optimizer.

A tenant is an adapter with accumulated gradients, Adam's moments and a step count. The methods of TenantLearner are the
operations of a training API: create, forward_backward, optim_step, save, load, export_adapter. turnlog.trainer.learner
is the learner of a run with one policy; both use the same model, microbatches and log-probs.
"""

from turnlog.trainer.tenants.adapters import AdapterSpec
from turnlog.trainer.tenants.datums import Datum
from turnlog.trainer.tenants.errors import (
    DatumIncomplete,
    DatumMisshapen,
    DatumNotFinite,
    DatumTokenUnknown,
    InvalidArgument,
    RankTooLarge,
    SavedUnusable,
    TenantError,
    TenantExists,
    UnknownLoss,
    UnknownTenant,
)
from turnlog.trainer.tenants.learner import ForwardBackwardResult, TenantLearner
from turnlog.trainer.tenants.losses import LOSSES
from turnlog.trainer.tenants.store import read_saved_spec

__all__ = [
    "LOSSES", "AdapterSpec", "Datum", "DatumIncomplete", "DatumMisshapen", "DatumNotFinite", "DatumTokenUnknown",
    "ForwardBackwardResult", "InvalidArgument", "RankTooLarge", "SavedUnusable", "TenantError", "TenantExists",
    "TenantLearner", "UnknownLoss", "UnknownTenant", "read_saved_spec",
]  # fmt: skip
