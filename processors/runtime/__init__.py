"""Roles that drive the folds from the log: the assembler and its reaper, and the batcher."""
