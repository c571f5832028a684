"""turnlog's plugin for SGLang, with which engines receive weights from training ranks (docs/engines.md)."""
