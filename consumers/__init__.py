"""Log to edge: weight loader, replay, reports, live displays."""

if __name__ == "consumers":
    raise ImportError("import turnlog.consumers, not consumers: a twin import copies every class")
