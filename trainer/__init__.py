"""Batches to Megatron steps to checkpoints to weights to weight-version events."""

if __name__ == "trainer":
    raise ImportError("import turnlog.trainer, not trainer: a twin import copies every class")
