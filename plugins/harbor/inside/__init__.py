"""Programs that run in sandboxes, with the image's python3 of at least 3.9 and its standard library."""
