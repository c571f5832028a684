"""Moved to turnlog.plugins.recipes; this path works until 0.3.0."""
