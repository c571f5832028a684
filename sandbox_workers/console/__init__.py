"""What `turnlog sandbox` and `turnlog session` do at a terminal."""
