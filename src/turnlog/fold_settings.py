"""Settings that say what a run's records mean: RunConfigured records them, and a run keeps them for life.

A key of these sections is recorded, hashed into what every derived record carries, and compared with it by value,
unless it is marked OPERATIONAL. A key that comes with a later release is marked `Since`: a run that was recorded
without it goes on as its release did, whatever the default has become.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from turnlog.names import EntryPointGroup
from turnlog.setting_types import Amount, Count, Offered, Seconds, Share

Stragglers = Literal["close", "wait", "cut"]
OPERATIONAL = "operational"
"""Marks a key that no record's meaning depends on: neither recorded nor compared, it may change at a restart."""


OWN = "the role's own"
"""Of a key that releases before had and did not record: each role went by its own settings."""


@dataclass(frozen=True, slots=True)
class Since:
    """Marks a key that not every release has recorded."""

    release: str
    """The first release that records it (turnlog.schemas.releases)."""
    before: Any = OWN
    """The value that does what the releases before it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSettings:
    """[fold] What trees, segments and advantages depend on: in RunConfigured, hashed into every derived record."""

    policy: Annotated[str, Offered(EntryPointGroup.POLICIES, ("prefix", "slime", "last-turn"))] = "prefix"
    """How turns become segments."""
    fork_threshold_tokens: Annotated[Amount, Since("v2", before=1024)] = 1024
    """Of slime: a turn of fewer output tokens realigns a response that drifted before it; 0 always forks."""
    estimator: Annotated[
        str,
        Offered(
            EntryPointGroup.ESTIMATORS,
            ("grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "step", "none"),
        ),
    ] = "grpo"
    """How the rewards of a group become advantages."""
    std_ddof: Annotated[int, Meta(ge=0, le=1)] = 1
    """Of grpo's standard deviation: 1 sample, 0 population."""
    discount: Annotated[Share, Since("v2", before=1.0)] = 1.0
    """Of step's rewards to go, per main turn."""
    min_valid: Amount = 0
    """Valid rollouts below which a group is discarded; 0: what the estimator needs."""
    zero_variance: Literal["keep", "discard"] = "keep"
    """keep: advantage 0; discard: the group is dropped (estimators that compare within the group only)."""
    group_filters: Annotated[
        tuple[str, ...],
        Offered(EntryPointGroup.GROUP_FILTERS, ("zero_variance", "all_failed", "all_solved", "mean_outside")),
        Since("v2", before=()),
    ] = ()
    """Groups to discard, in order: zero_variance, all_failed:BEST, all_solved:LEAST, mean_outside:LOW:HIGH."""
    reward_transforms: Annotated[
        tuple[str, ...],
        Offered(EntryPointGroup.REWARD_TRANSFORMS, ("scale", "shift", "clip", "threshold")),
        Since("v2", before=()),
    ] = ()
    """Done to each reward, in order: scale:FACTOR, shift:OFFSET, clip:LOW:HIGH, threshold:LEAST."""
    truncated: Literal["train", "mask_last_turn", "exclude"] = "train"
    """What becomes of a session that hit a limit: all of it trains, all but its last turn, or none."""
    train_sub_agents: bool = True
    """Whether turns of sub-agents train; else they are masked."""
    train_side_calls: bool = False
    """Whether turns of side calls (titles, summaries) train; else they are masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherSettings:
    """[batcher] Draws and batches: in RunConfigured beside [fold], but for what a manifest says itself."""

    prompts_per_draw: Count = 16
    """Groups that are drawn together."""
    updates_per_draw: Count = 1
    """Batches, and so optimizer steps, that a draw is cut into."""
    max_lag: Amount = 0
    """Published versions between the oldest token of a trajectory and the weights that train it; 0 is strictly
    on-policy."""
    max_tokens: Count = 4096
    """Longer samples lose their tail."""
    weighting: Literal["prompt", "trajectory", "token", "constant"] = "prompt"
    """What has equal weight in a batch's loss; constant: each token 1 / constant_length."""
    constant_length: Count = 1024
    """L of `constant`."""
    version_mask: Literal["none", "latest_only", "max_lag"] = "none"
    """Tokens that train: of all versions, of the newest of their row, or of those at most max_lag behind."""
    order: Annotated[Literal["oldest", "freshest"], OPERATIONAL] = "oldest"
    """Which waiting groups are drawn first. Not recorded: a manifest names the groups that were drawn."""
    ready_batches: Annotated[Count, OPERATIONAL] = 2
    """Batches formed ahead of the last completed step, at most. Not recorded: a manifest names the version that it was
    formed at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblerSettings:
    """[assembler] The transactional runner: in RunConfigured, which records of a group are too late for it."""

    max_records: Annotated[Count, OPERATIONAL] = 500
    """Records folded per transaction at most."""
    poll_ms: Annotated[int, Meta(ge=1, le=60_000), OPERATIONAL] = 20
    """Wait for records, at most."""
    reaper_silence_s: Annotated[Seconds, OPERATIONAL] = 600.0
    """A session silent for longer is expired."""
    group_deadline_s: Annotated[Seconds, OPERATIONAL] = 1800.0
    """A group open for longer is closed with what it has; under `wait`, one silent for longer."""
    stragglers: Annotated[Stragglers, OPERATIONAL] = "close"
    """Of a group whose slowest rollouts hold it up. close: it is closed at its deadline; wait: never while one of them
    says something; cut: also as soon as feeder.group_size of its rollouts can be trained on. What is open then stops.
    """
    commit_interval_s: Annotated[float, Meta(ge=0, le=3600), OPERATIONAL] = 1.0
    """Scores and their samples are committed at once, trees and progress this often."""
    horizon_records: Annotated[Amount, Since("v3")] = 20_000
    """agent.sessions records of one partition between a group's admission and its first record, at most: a group that
    shows up later is taken for one that was scored and forgotten. A restart reads back the samples of that span."""


FOLD_SECTIONS: dict[str, type] = {"fold": FoldSettings, "batcher": BatcherSettings, "assembler": AssemblerSettings}
"""Sections with keys that decide derived records: of the fold, of draws, of what comes too late."""
