"""Environments (`Recipe`) that come with turnlog; others are found by the entry point group `turnlog.recipes`."""
