"""Moved to turnlog.plugins.recipes.repair; this path works until 0.3.0."""

from turnlog.plugins.recipes.repair import *  # noqa: F403
