"""`turnlog replay`: the log folded again, held against what was trained, or folded under other settings."""
