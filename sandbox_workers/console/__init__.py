"""`turnlog sandbox pool|check|exec`."""
