"""Moved to turnlog.infra.environments.tools; this path works until 0.3.0."""

from turnlog.infra.environments.tools import *  # noqa: F403
