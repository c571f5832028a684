"""Log to edge: weight loader, replay, datasets, archive, index."""

if __name__ == "consumers":
    raise ImportError("import turnlog.consumers, not consumers: a twin import copies every class")
