"""The embedded runtime: real servers as child processes of one supervisor, on one machine, without an installation."""
