"""The verbs `turnlog sandbox` and `turnlog session`."""
