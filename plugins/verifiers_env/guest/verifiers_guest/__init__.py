"""Code that runs in the environment's interpreter, with verifiers and without turnlog."""
