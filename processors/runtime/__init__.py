"""Roles that drive the folds from the log: the assembler and its reaper, the batcher, the Faust live views."""
