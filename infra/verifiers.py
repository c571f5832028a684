"""Moved to turnlog.infra.environments.verifiers; this path works until 0.3.0."""

from turnlog.infra.environments.verifiers import *  # noqa: F403
