"""Log to log: `core` is pure folds and arithmetic, `runtime` drives them from the log."""

if __name__ == "processors":
    raise ImportError("import turnlog.processors, not processors: a twin import copies every class")
