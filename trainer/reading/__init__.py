"""From manifests to checked rows: each batch of the log is read while the one before it trains."""
