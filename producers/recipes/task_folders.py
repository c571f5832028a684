"""Moved to turnlog.plugins.recipes.task_folders; this path works until 0.3.0."""

from turnlog.plugins.recipes.task_folders import *  # noqa: F403
