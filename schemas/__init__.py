"""The language of the log: event records, ids, topic catalogue, codec, evolution rules."""

if __name__ == "schemas":
    raise ImportError("import turnlog.schemas, not schemas: a twin import copies every class")
