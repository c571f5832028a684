"""What the gateway counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)

TURNS = Counter("turnlog_gateway_turns", "Turns recorded", ("finish_reason", "boundary", "reason"))
TOKENS = Counter("turnlog_gateway_tokens", "Tokens of recorded turns", ("kind",))
IGNORED = Counter("turnlog_gateway_ignored_fields", "Request fields that were not honoured", ("field",))
ERRORS = Counter("turnlog_gateway_errors", "Requests answered with an error", ("code",))
REPEATS = Counter("turnlog_gateway_repeats", "Requests answered with a turn that was recorded before")
RESUBMITTED = Counter("turnlog_gateway_resubmitted", "Engine calls continued elsewhere or after an abort", ("cause",))
WITHOUT_EXPERTS = Counter(
    "turnlog_gateway_turns_without_experts", "Turns of a mixture of experts whose engine gave no or not all rows"
)
OPEN = Gauge("turnlog_gateway_sessions", "Sessions held in memory")
ADOPTED = Counter("turnlog_gateway_adopted", "Sessions taken over from another gateway")
ENGINE_S = Histogram("turnlog_gateway_engine_seconds", "One engine call", ("engine",), buckets=SECONDS)
RECORD_S = Histogram("turnlog_gateway_record_seconds", "A turn's records until acks=all", buckets=SECONDS)
