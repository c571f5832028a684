"""Clients of real machines (Kafka, registry, object store, SGLang, vLLM) and the embedded runtime."""

if __name__ == "infra":
    raise ImportError("import turnlog.infra, not infra: a twin import copies every class")
