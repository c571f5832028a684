"""Formation of the batches that a trainer steps on: rollout batches, rows, weights, and staleness."""
