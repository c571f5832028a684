"""Moved to turnlog.trainer.families; this path goes with 0.3.0."""

import warnings

from turnlog.trainer.families.family import Family
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.families.tensors import Tensor, decoder_tensors

__all__ = ["Family", "ModelShape", "Tensor", "decoder_tensors"]
warnings.warn("turnlog.trainer.shape moved to turnlog.trainer.families", DeprecationWarning, stacklevel=2)
