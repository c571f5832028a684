"""Pure folds and arithmetic: no clock, no I/O, no randomness, no framework."""
