"""Data loading: from manifests to checked rows. Each batch is read while the previous one trains."""
