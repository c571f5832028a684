"""`turnlog fold`: what each policy would train of recorded sessions, side by side."""
