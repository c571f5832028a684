"""Settings that decide what a run's records mean. RunConfigured records them, and they stay fixed for the life of the
run.

Each key of these sections is recorded, hashed into the settings hash of every derived record, and compared by value
when the run starts again, unless it is marked OPERATIONAL. A key that a later release adds is marked `Since`: a run
recorded without it keeps the behaviour of its release, whatever the default is now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from turnlog.names import EntryPointGroup
from turnlog.setting_types import Amount, Count, Offered, Seconds, Share

Stragglers = Literal["close", "wait", "cut"]
OPERATIONAL = "operational"
"""Marks a key that does not affect the meaning of any record: it is neither recorded nor compared, and may change at a
restart."""


OWN = "the role's own"
"""Value of `Since.before` for a key that earlier releases had but did not record: each role used its own setting."""


@dataclass(frozen=True, slots=True)
class Since:
    """Marks a key that not every release records."""

    release: str
    """The first release that records it (turnlog.schemas.releases)."""
    before: Any = OWN
    """The value that reproduces the behaviour of earlier releases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSettings:
    """[fold] Settings that trees, segments and advantages depend on. RunConfigured records them, and every derived
    record carries their hash."""

    policy: Annotated[str, Offered(EntryPointGroup.POLICIES, ("prefix", "slime", "last-turn"))] = "prefix"
    """Trajectory rule: how the turns of a session are cut into segments (docs/folds.md)."""
    fork_threshold_tokens: Annotated[Amount, Since("v2", before=1024)] = 1024
    """Token threshold of `policy = "slime"`, below which a drift from the recorded turns realigns them instead of
    forking a new segment. A turn with fewer output tokens than this gives way to a rewrite of its message, or replaces
    the part of the response before it that it contradicts. 0 always forks."""
    estimator: Annotated[
        str,
        Offered(
            EntryPointGroup.ESTIMATORS,
            ("grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "step", "none"),
        ),
    ] = "grpo"
    """Estimator that turns the rewards of a group into advantages (docs/folds.md)."""
    std_ddof: Annotated[int, Meta(ge=0, le=1)] = 1
    """Delta degrees of freedom of the standard deviation in `grpo`: 1 for the sample, 0 for the population."""
    discount: Annotated[Share, Since("v2", before=1.0)] = 1.0
    """Discount factor of `estimator = "step"`, per main turn of the reward to go."""
    min_valid: Amount = 0
    """Minimum number of valid rollouts; a group with fewer is discarded. 0: the minimum of the estimator."""
    zero_variance: Literal["keep", "discard"] = "keep"
    """Treatment of a group whose rewards are all equal, under estimators that compare rollouts within the group. keep:
    train it with advantage 0. discard: drop the group."""
    group_filters: Annotated[
        tuple[str, ...],
        Offered(EntryPointGroup.GROUP_FILTERS, ("zero_variance", "all_failed", "all_solved", "mean_outside")),
        Since("v2", before=()),
    ] = ()
    """Filters that discard groups, applied in order: zero_variance, all_failed:BEST, all_solved:LEAST,
    mean_outside:LOW:HIGH."""
    reward_transforms: Annotated[
        tuple[str, ...],
        Offered(EntryPointGroup.REWARD_TRANSFORMS, ("scale", "shift", "clip", "threshold", "overlong")),
        Since("v2", before=()),
    ] = ()
    """Transforms applied to each reward, in order: scale:FACTOR, shift:OFFSET, clip:LOW:HIGH, threshold:LEAST,
    overlong:LONGEST:BUFFER:PENALTY (a penalty that rises in the last BUFFER tokens before LONGEST; docs/folds.md)."""
    truncated: Literal["train", "mask_last_turn", "exclude"] = "train"
    """Training of a session that hit a limit. train: all of its turns. mask_last_turn: all but the last turn. exclude:
    none."""
    train_sub_agents: bool = True
    """Whether to train the turns of sub-agents; if false, they are masked."""
    train_side_calls: bool = False
    """Whether to train the turns of side calls, such as titles; if false, they are masked."""
    train_compactions: Annotated[bool, Since("v9", before=True)] = True
    """Whether to train the summaries by which an agent compacts its history, with the advantage of the trajectory that
    goes on from them; if false, they are masked. Runs of fold version 4 and earlier have no such kind: their summaries
    train as turns of the main agent, or are side calls."""
    exclude_flagged: Annotated[
        tuple[str, ...],
        Offered(
            EntryPointGroup.CHEAT_DETECTORS,
            ("tests_touched", "verifier_bypassed", "hidden_files", "copied_answer", "git_history", "network_tried",
             "clock"),
        ),
        Since("v9", before=()),
    ] = ()  # fmt: skip
    """Detectors of cheating whose flags keep a session out of training (docs/cheating.md). Its tokens are masked as
    `flagged`. The assembler then reads the messages of all turns."""
    flagged_above: Annotated[float, Meta(ge=-1e100, le=1e100), Since("v9", before=0.0)] = 0.0
    """Reward above which a session is a success that detectors of cheating look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherSettings:
    """[batcher] The role that forms rollout batches ("draws") and training batches from scored groups. RunConfigured
    records these settings beside [fold], except those that the batch manifest states itself."""

    prompts_per_draw: Count = 16
    """Number of groups in one draw, that is, in one rollout batch."""
    updates_per_draw: Count = 1
    """Number of batches, and so of optimizer steps, that a draw is cut into."""
    max_lag: Amount = 0
    """Maximum lag in published weight versions between the oldest token of a trajectory and the weights that train it;
    staler trajectories are not trained. 0 is strictly on-policy."""
    max_tokens: Count = 4096
    """Maximum length of a sample in tokens; longer samples are cut at the end."""
    weighting: Literal["prompt", "trajectory", "token", "constant"] = "prompt"
    """Unit of equal weight in the loss of a batch: each prompt (group), each trajectory or each token. constant: each
    token weighs 1 / constant_length, averaged over the trajectories."""
    constant_length: Count = 1024
    """Divisor L of `weighting = "constant"`, in tokens."""
    version_mask: Literal["none", "latest_only", "max_lag"] = "none"
    """Restriction of the trained tokens by weight version. none: all train. latest_only: those of the newest version in
    their row. max_lag: those at most `max_lag` versions old."""
    order: Annotated[Literal["oldest", "freshest"], OPERATIONAL] = "oldest"
    """Order in which waiting groups are drawn. Not recorded, since each manifest lists the groups that were drawn."""
    ready_batches: Annotated[Count, OPERATIONAL] = 2
    """Maximum number of batches that are formed ahead of the last completed step. Raise it to hide a slow batcher;
    lower it to fix the composition of batches later. Not recorded, since each manifest names the version that it was
    formed at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblerSettings:
    """[assembler] The role that folds turns into samples, one transaction at a time. RunConfigured records the settings
    that decide which records of a group come too late."""

    reaper_silence_s: Annotated[Seconds, OPERATIONAL] = 600.0
    """Seconds without a record after which an unfinished session is expired."""
    group_deadline_s: Annotated[Seconds, OPERATIONAL] = 1800.0
    """Seconds after which an open group is closed with the sessions that it has. They count from the opening of the
    group; with `stragglers = "wait"`, from its last record."""
    stragglers: Annotated[Stragglers, OPERATIONAL] = "close"
    """Treatment of a group that waits for its slowest rollouts. close: close it at its deadline. wait: close it only
    after it has had no record for `group_deadline_s`. cut: also close it as soon as feeder.group_size of its rollouts
    can be trained on. Sessions that are still open when their group closes are stopped."""
    commit_interval_s: Annotated[float, Meta(ge=0, le=3600), OPERATIONAL] = 1.0
    """Seconds between commits of trees and progress. Group scores and their samples are committed at once."""
    horizon_records: Annotated[Amount, Since("v3")] = 20_000
    """Maximum number of agent.sessions records in one partition between the admission of a group and its first record.
    A group whose first record comes later is treated as already scored and forgotten. A restart reads back the samples
    of that span."""


FOLD_SECTIONS: dict[str, type] = {"fold": FoldSettings, "batcher": BatcherSettings, "assembler": AssemblerSettings}
"""Sections with keys that decide derived records: the fold, the forming of batches, and which records are too late."""
