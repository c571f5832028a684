"""Code of `turnlog sandbox pool|check|exec` and `turnlog log session show|rerun`."""
