"""Versions of the fold: what it reads and writes, and what each version makes otherwise of the same records.

A run keeps the version of its RunConfigured for life, and every reader of its records chooses by it: the assembler,
replay, the books. A rule that would give old records other outputs is a new entry here, beside the old one.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.schemas.events import GroupEmitted, GroupScored
from turnlog.schemas.topics import GROUP_SCORES, SAMPLES, SESSIONS, SNAPSHOTS, TREES, TURNS, Topic
from turnlog.settings import SettingsError

SPINE = SESSIONS.name
INPUTS = (SPINE, TURNS.name, SNAPSHOTS.name)
OUTPUTS = (TREES.name, SAMPLES.name)
"""Of every fold version; `outputs_of` has those of one."""


class UnknownFoldVersion(SettingsError):
    """The run was folded by rules that this release does not hold. Remedy: use the release that recorded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldVersion:
    """One version. Its records carry `name`."""

    name: str
    aborted_leaves_train: bool
    """A leaf that the finish names trains although its client was seen gone, unless the output itself is partial
    (finish_reason abort or error): the finish says what was acted on. Before, every aborted leaf was taken out."""
    steps_need_named_turns: bool
    """A step reward counts when the counting finish names its turn, and is paid when the turn was acted on. Before,
    one for any turn settled a session and was paid."""
    retries_need_answers: bool
    """A finished leaf gives way to a later turn with the same prompt only if that one is not taken out itself."""
    empty_groups_fail: bool
    """A group with nothing to train is discarded, so that its task is drawn again. Before, it was `trained` with 0
    samples and took a place in a draw."""
    group_scores: bool
    """A GroupEmitted goes out with each GroupScored, on a topic of its own. Before, there was none."""
    group_rewards: bool
    """It carries the rewards of the valid rollouts. Before, it had none."""
    spans_by_cache: bool
    """A sample's spans say on whose cache their tokens were sampled. Before, spans of one weight version were one."""


VERSIONS = {
    version.name: version
    for version in (
        FoldVersion(
            name="1", aborted_leaves_train=False, steps_need_named_turns=False, retries_need_answers=False,
            empty_groups_fail=False, group_scores=False, group_rewards=False, spans_by_cache=False,
        ),
        FoldVersion(
            name="2", aborted_leaves_train=True, steps_need_named_turns=True, retries_need_answers=True,
            empty_groups_fail=True, group_scores=True, group_rewards=False, spans_by_cache=False,
        ),
        FoldVersion(
            name="3", aborted_leaves_train=True, steps_need_named_turns=True, retries_need_answers=True,
            empty_groups_fail=True, group_scores=True, group_rewards=True, spans_by_cache=False,
        ),
        FoldVersion(
            name="4", aborted_leaves_train=True, steps_need_named_turns=True, retries_need_answers=True,
            empty_groups_fail=True, group_scores=True, group_rewards=True, spans_by_cache=True,
        ),
    )
}  # fmt: skip
LATEST = VERSIONS["4"]
FOLD_VERSION = LATEST.name
"""Of runs that begin today."""


def fold_version(name: str) -> FoldVersion:
    """The rules of a recorded version. Raises UnknownFoldVersion."""
    if name not in VERSIONS:
        raise UnknownFoldVersion(
            f"fold version {name!r} is unknown here ({', '.join(VERSIONS)} are known): use the release that recorded it"
        )
    return VERSIONS[name]


def score_record(version: str) -> str:
    """The record that says what became of a group of a run with that fold version. Raises UnknownFoldVersion."""
    return GroupEmitted.__name__ if fold_version(version).group_scores else GroupScored.__name__


def scores_topic(version: str) -> Topic:
    """Where it stands. Raises UnknownFoldVersion."""
    return GROUP_SCORES if fold_version(version).group_scores else SAMPLES


def outputs_of(version: str) -> tuple[str, ...]:
    """The topics that a unit writes under that fold version. Raises UnknownFoldVersion."""
    return tuple(dict.fromkeys((*OUTPUTS, scores_topic(version).name)))
