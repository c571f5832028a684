"""`turnlog replay`: fold the log again, compare the result with what was trained, or fold under other settings."""
