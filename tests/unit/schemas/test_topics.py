"""The catalogue: each record has one topic, each topic a key that its records carry."""

from __future__ import annotations

from collections import Counter

from tests.each import each
from turnlog.schemas.avsc import field_types
from turnlog.schemas.events import ALL, DeadLetter, EngineGone
from turnlog.schemas.topics import (
    BY_NAME,
    CATALOGUE,
    DEAD_LETTERS,
    ENGINES,
    INLINE_LIMIT_BYTES,
    MAX_MESSAGE_BYTES,
    SESSION_KEYS,
    TOPIC_OF,
    Topic,
)

UNIT_OF_GROUPS = {
    "agent.sessions", "agent.turns", "agent.token-snapshots", "turn-trees", "segment-samples", "group-scores",
    "sample-scores",
}  # fmt: skip
UNIT_OF_ROLLOUTS = {"tasks", "agent.tool-calls", "agent.tool-results"}


def test_every_record_has_exactly_one_topic() -> None:
    assert Counter(record for topic in CATALOGUE for record in topic.records) == Counter(list(ALL))
    assert set(TOPIC_OF) == set(ALL)
    assert {name for name in ALL if name not in TOPIC_OF[name].records} == set()


def test_names_are_unique_and_legal_for_kafka() -> None:
    assert len(BY_NAME) == len(CATALOGUE)
    for name in BY_NAME:
        assert name.replace(".", "").replace("-", "").isalnum()


@each("topic", CATALOGUE, ids=lambda topic: topic.name)
def test_every_record_of_a_topic_carries_its_key(topic: Topic) -> None:
    for record in topic.records:
        assert topic.key in field_types(ALL[record])


def test_units_share_a_key_and_a_count() -> None:
    assert {topic.name for topic in CATALOGUE if topic.partitions == "groups"} == UNIT_OF_GROUPS
    assert {topic.name for topic in CATALOGUE if topic.partitions == "rollouts"} == UNIT_OF_ROLLOUTS
    assert {BY_NAME[name].key for name in UNIT_OF_GROUPS} == {"group_id"}
    assert {BY_NAME[name].key for name in UNIT_OF_ROLLOUTS} == {"rollout_id"}


@each("topic", CATALOGUE, ids=lambda topic: topic.name)
def test_nothing_expires_and_only_the_keys_of_sessions_are_compacted(topic: Topic) -> None:
    config, policy = topic.config(), "compact" if topic is SESSION_KEYS else "delete"
    assert (config["cleanup.policy"], config["retention.ms"], config["retention.bytes"]) == (policy, "-1", "-1")


def test_a_record_with_every_payload_inline_fits_a_message() -> None:
    """TokenSnapshot has the most payload fields: three arrays."""
    assert int(CATALOGUE[0].config()["max.message.bytes"]) == MAX_MESSAGE_BYTES
    assert MAX_MESSAGE_BYTES > 4 * INLINE_LIMIT_BYTES


def test_keys_are_utf8_of_the_field_and_bytes_as_they_are() -> None:
    gone = EngineGone(event_id="e", run_id="r", engine_id="näme", url="u", state="gone", version=0, cause="c")
    assert ENGINES.key_of(gone) == "näme".encode()
    letter = DeadLetter(
        event_id="e", run_id="r", topic="t", partition=0, offset=0, key=b"\xff\x00", value=b"", role="a", cause="c",
        message="m",
    )  # fmt: skip
    assert DEAD_LETTERS.key_of(letter) == b"\xff\x00"
