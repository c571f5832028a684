"""Random datums, and the arguments of optimizer steps on them."""

from __future__ import annotations

import numpy as np

from turnlog.trainer.tenants import Datum

ADAM = {
    "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0
}  # fmt: skip
"""Defaults of the Tinker API, with another rate."""


def synthetic_datums(
    seed: int, *, count: int = 5, shifted: bool = True, prefix: int = 0, weights: bool = True, vocabulary: int = 384
) -> list[Datum]:
    """Return datums of 5 to 40 positions after `prefix` equal tokens. Their targets are the next tokens if `shifted`,
    else any."""
    random = np.random.default_rng(seed)
    shared = random.integers(0, vocabulary, prefix)
    found = []
    for _ in range(count):
        length = prefix + int(random.integers(5, 41))
        row = np.concatenate([shared, random.integers(0, vocabulary, length + 1 - prefix)]).astype("<i4")
        found.append(
            Datum(
                tokens=row[:-1],
                targets=row[1:] if shifted else random.integers(0, vocabulary, length).astype("<i4"),
                weights=random.normal(1, 1, length).astype("<f4") if weights else None,
                logprobs=random.normal(-6, 0.5, length).astype("<f4"),
                advantages=random.normal(0, 1, length).astype("<f4"),
            )
        )
    return found
