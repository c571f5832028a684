"""Moved to turnlog.infra.environments.recipes; this path works until 0.3.0."""

from turnlog.infra.environments.recipes import *  # noqa: F403
