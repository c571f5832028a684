"""Versions of the fold: what it reads and writes, and how the versions differ on the same records.

A run keeps the fold version of its RunConfigured, and every reader of its records uses it: the assembler, replay and
token accounting. A rule that would derive other outputs from old records is a new entry here, beside the old one.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.schemas.events import GroupEmitted, GroupScored
from turnlog.schemas.topics import GROUP_SCORES, SAMPLES, SESSIONS, SNAPSHOTS, TREES, TURNS, Topic
from turnlog.settings import SettingsError

SPINE = SESSIONS.name
INPUTS = (SPINE, TURNS.name, SNAPSHOTS.name)
OUTPUTS = (TREES.name, SAMPLES.name)
"""Output topics common to all fold versions; `outputs_of` returns those of one version."""


class UnknownFoldVersion(SettingsError):
    """The run was folded by rules that this release does not have. Remedy: use the release that recorded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldVersion:
    """The rules of one fold version. Its records carry `name`."""

    name: str
    aborted_leaves_train: bool
    """A leaf that the finish names trains although its client was seen disconnected, unless the output itself is
    partial (finish_reason abort or error): the finish states what was acted on. Before, every aborted leaf was removed.
    """
    steps_need_named_turns: bool
    """A step reward is effective if the effective finish names its turn, and is credited if the turn was acted on.
    Before, a step reward for any turn could settle a session and was credited.
    """
    retries_need_answers: bool
    """A finished leaf gives way to a later turn with the same prompt only if that turn is not removed itself."""
    empty_groups_fail: bool
    """A group with nothing to train is discarded, so that its task is sampled again. Before, it was `trained` with 0
    samples and took a place in a rollout batch.
    """
    group_scores: bool
    """A GroupEmitted is written with each GroupScored, to a separate topic. Before, there was none."""
    group_rewards: bool
    """GroupEmitted carries the rewards of the valid rollouts. Before, it had none."""
    spans_by_cache: bool
    """The spans of a sample also name the version whose KV cache their tokens were sampled on. Before, adjacent spans
    of one weight version were merged.
    """
    compactions: bool
    """Summaries of a history are a kind of lineage of their own, and [fold] train_compactions decides about them.
    Before, they were turns of main if they were requested like those, else side calls.
    """
    spans_by_engine: bool
    """The spans of a sample also name the kind of the engine that sampled their tokens, if the record of the turn does.
    Before, adjacent spans were merged whatever their kinds.
    """
    players: bool
    """Players that have rewards of their own are compared with the same player of the other rollouts. Before, the first
    reward was that of the whole session, whichever player it named.
    """


VERSIONS = {
    version.name: version
    for version in (
        FoldVersion(
            name="1", aborted_leaves_train=False, steps_need_named_turns=False, retries_need_answers=False,
            empty_groups_fail=False, group_scores=False, group_rewards=False, spans_by_cache=False,
            compactions=False, spans_by_engine=False, players=False,
        ),
        FoldVersion(
            name="2", aborted_leaves_train=True, steps_need_named_turns=True, retries_need_answers=True,
            empty_groups_fail=True, group_scores=True, group_rewards=False, spans_by_cache=False,
            compactions=False, spans_by_engine=False, players=False,
        ),
        FoldVersion(
            name="3", aborted_leaves_train=True, steps_need_named_turns=True, retries_need_answers=True,
            empty_groups_fail=True, group_scores=True, group_rewards=True, spans_by_cache=False,
            compactions=False, spans_by_engine=False, players=False,
        ),
        FoldVersion(
            name="4", aborted_leaves_train=True, steps_need_named_turns=True, retries_need_answers=True,
            empty_groups_fail=True, group_scores=True, group_rewards=True, spans_by_cache=True,
            compactions=False, spans_by_engine=False, players=False,
        ),
        FoldVersion(
            name="5", aborted_leaves_train=True, steps_need_named_turns=True, retries_need_answers=True,
            empty_groups_fail=True, group_scores=True, group_rewards=True, spans_by_cache=True,
            compactions=True, spans_by_engine=True, players=True,
        ),
    )
}  # fmt: skip
LATEST = VERSIONS["5"]
FOLD_VERSION = LATEST.name
"""Fold version of new runs."""


def fold_version(name: str) -> FoldVersion:
    """Return the rules of a recorded version. Raises UnknownFoldVersion if this release does not have it."""
    if name not in VERSIONS:
        raise UnknownFoldVersion(
            f"fold version {name!r} is unknown here ({', '.join(VERSIONS)} are known): use the release that recorded it"
        )
    return VERSIONS[name]


def score_record(version: str) -> str:
    """Return the type name of the record that reports the result of a group under a fold version. Raises
    UnknownFoldVersion.
    """
    return GroupEmitted.__name__ if fold_version(version).group_scores else GroupScored.__name__


def scores_topic(version: str) -> Topic:
    """Return the topic of `score_record`. Raises UnknownFoldVersion."""
    return GROUP_SCORES if fold_version(version).group_scores else SAMPLES


def outputs_of(version: str) -> tuple[str, ...]:
    """Return the topics that a partition task writes under a fold version. Raises UnknownFoldVersion."""
    return tuple(dict.fromkeys((*OUTPUTS, scores_topic(version).name)))
