"""The columns of each view, as Arrow schemas. Parquet and Arrow files hold exactly these."""

from __future__ import annotations

import pyarrow as pa

TEXT, INT, LONG, REAL, FLAG = pa.string(), pa.int32(), pa.int64(), pa.float64(), pa.bool_()

BLOB = [("sha256", TEXT), ("size", LONG), ("media_type", TEXT)]
SPAN = pa.struct(
    [("start", INT), ("length", INT), ("epoch", TEXT), ("turn", INT), ("version", LONG), ("trained", FLAG),
     ("advantage", REAL)]
)  # fmt: skip
"""One turn's output of one weight version; `advantage` is null where the row's holds."""
EXPERT = pa.struct([*BLOB, ("row_start", LONG), ("row_count", LONG), ("target_start", LONG)])
IMAGE = pa.struct([*BLOB, ("position", LONG), ("tokens", LONG)])

CALL = pa.struct([("id", TEXT), ("type", TEXT), ("function", pa.struct([("name", TEXT), ("arguments", TEXT)]))])
"""OpenAI's shape; `arguments` is JSON text, as on the wire, since columns have one type and arguments do not."""
MESSAGE = pa.struct(
    [("role", TEXT), ("content", TEXT), ("reasoning_content", TEXT), ("name", TEXT), ("tool_call_id", TEXT),
     ("tool_calls", pa.list_(CALL))]
)  # fmt: skip
MESSAGES = pa.list_(MESSAGE)

GROUP = [("run_id", TEXT), ("group_id", TEXT), ("task_id", TEXT), ("recipe", TEXT), ("purpose", TEXT)]
TASK = [("dataset", TEXT), ("task_type", TEXT)]
"""Null where no RolloutRequested of the group is on the log, or its row says no type."""

RL = pa.schema(
    [
        *GROUP,
        ("session_id", TEXT),
        ("rollout_id", TEXT),
        ("sample_id", TEXT),
        ("rollout_index", INT),
        ("segment_index", INT),
        ("segment_count", INT),
        ("is_anchor", FLAG),
        ("outcome", TEXT),
        ("reward", REAL),
        ("advantage", REAL),
        ("temperature", REAL),
        ("logprob_kind", TEXT),
        ("weight_version_min", LONG),
        ("weight_version_max", LONG),
        ("trained_tokens", LONG),
        ("token_ids", pa.list_(INT)),
        ("trained", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("spans", pa.list_(SPAN)),
        ("experts", pa.list_(EXPERT)),
        ("experts_gap", TEXT),
        ("images", pa.list_(IMAGE)),
    ]
)
"""One row per SegmentSample. The four token columns are aligned: entry t is about token t."""

SFT = pa.schema(
    [
        *GROUP,
        *TASK,
        ("session_id", TEXT),
        ("rollout_id", TEXT),
        ("rollout_index", INT),
        ("outcome", TEXT),
        ("reward", REAL),
        ("agent", TEXT),
        ("model", TEXT),
        ("environment", TEXT),
        ("environment_version", TEXT),
        ("finish_reason", TEXT),
        ("weight_version_min", LONG),
        ("weight_version_max", LONG),
        ("turns", INT),
        ("tokens", LONG),
        ("messages", MESSAGES),
        ("tools", TEXT),
    ]
)
"""One row per conversation; `tools` is the JSON list of tool schemas that the last turn was offered."""

PREFERENCE = pa.schema(
    [
        *GROUP,
        *TASK,
        ("chosen_session_id", TEXT),
        ("rejected_session_id", TEXT),
        ("chosen_outcome", TEXT),
        ("rejected_outcome", TEXT),
        ("chosen_reward", REAL),
        ("rejected_reward", REAL),
        ("margin", REAL),
        ("tokens", LONG),
        ("prompt", MESSAGES),
        ("chosen", MESSAGES),
        ("rejected", MESSAGES),
        ("tools", TEXT),
    ]
)
"""One row per pair of one group: prompt + chosen and prompt + rejected are the two conversations."""

VIEWS: dict[str, pa.Schema] = {"rl": RL, "sft": SFT, "preference": PREFERENCE}
