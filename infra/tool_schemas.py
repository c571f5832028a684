"""Moved to turnlog.infra.tools; this path goes with 0.2.0."""

import warnings

from turnlog.infra.tools import tool_declarations

__all__ = ["tool_declarations"]
warnings.warn("turnlog.infra.tool_schemas moved to turnlog.infra.tools", DeprecationWarning, stacklevel=2)
