"""Processors from log to log: `core` holds pure folds and arithmetic, `runtime` drives them from the log."""

if __name__ == "processors":
    raise ImportError("import turnlog.processors, not processors: a twin import copies every class")
