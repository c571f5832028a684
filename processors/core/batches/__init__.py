"""Scored groups become the batches that a trainer steps on: draws, rows, weights, and how stale they are."""
