"""The books as a Prometheus counter: what each role counted of the tokens that passed through it.

For every level, `sampled` must equal the sum of all other entries; what is trained at one level is sampled at the next
(docs/operations.md has the alerts).
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter

TOKENS = Counter(
    "turnlog_books_tokens", "Output tokens by level (group, draw, step) and entry (sampled, trained, a reason)",
    ["level", "entry"],
)  # fmt: skip


def count(level: str, *, sampled: int, trained: int, masked: Mapping[str, int]) -> None:
    """Add what one group, draw or step holds. `sampled` is counted apart from the others, or nothing is checked."""
    TOKENS.labels(level, "sampled").inc(sampled)
    TOKENS.labels(level, "trained").inc(trained)
    for reason, tokens in masked.items():
        TOKENS.labels(level, reason).inc(tokens)
