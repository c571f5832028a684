"""Code of `turnlog sandbox pool|check|exec` and `turnlog session show|rerun`."""
