"""Tool execution: worker, isolation backends, warm pools."""

if __name__ == "sandbox_workers":
    raise ImportError("import turnlog.sandbox_workers, not sandbox_workers: a twin import copies every class")
