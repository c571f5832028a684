"""Log to log: `core` is pure folds and arithmetic, `shells` drives them."""

if __name__ == "processors":
    raise ImportError("import turnlog.processors, not processors: a twin import copies every class")
