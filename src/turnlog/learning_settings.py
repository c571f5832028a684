"""The part of [trainer] that chooses the loss, and the check for choices that contradict each other.

The formulas are in docs/algorithms.md, the functions in turnlog.trainer.algorithms. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from turnlog.names import EntryPointGroup
from turnlog.setting_types import Amount, Count, Offered, Rate, SettingsError, Share

Bound = Annotated[float, Meta(ge=0, le=1e9)]
Wants = Mapping[str, tuple[str, ...]]
"""Setting -> the values of it that an algorithm is defined with: {"fold.estimator": ("rloo",)}."""

WANTS: Mapping[str, Wants] = {
    "grpo": {},
    "dr_grpo": {"fold.estimator": ("dr_grpo",), "batcher.weighting": ("constant",)},
    "dapo": {"fold.estimator": ("grpo",), "batcher.weighting": ("token",), "trainer.kl": ("none",)},
    "rloo": {"fold.estimator": ("rloo",)},
    "reinforce_pp": {"fold.estimator": ("reinforce_pp", "reinforce_pp_baseline")},
    "gspo": {"batcher.weighting": ("trajectory",)},
    "sapo": {},
    "cispo": {},
    "clip_cov": {},
    "kl_cov": {},
    "dppo_tv": {},
    "dppo_kl": {},
    "ppo": {"fold.estimator": ("none",)},
    "opd": {"fold.estimator": ("none",)},
}
"""Required settings by built-in algorithm."""
WIDEST_TRAJECTORY_CLIP = 0.05
"""Largest clip bound accepted for gspo, whose authors use 3e-4 and 4e-4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSettings:
    """[trainer] The loss of a step."""

    algorithm: Annotated[str, Offered(EntryPointGroup.ALGORITHMS, tuple(WANTS), numbers=True)] = "grpo"
    """The loss of a token, followed by its parameters if it takes any, as in sapo:1:1.05 (docs/algorithms.md)."""
    clip_low: Share = 0.2
    """Lower clip distance: probability ratios are clipped at 1 - clip_low."""
    clip_high: Bound = 0.2
    """Upper clip distance: probability ratios are clipped at 1 + clip_high."""
    dual_clip: Bound = 3.0
    """Upper bound on the ratio of tokens with a negative advantage (dual-clip PPO); it must be above 1. 0 sets no
    bound. sapo, cispo, kl_cov, dppo_tv and dppo_kl ignore this."""
    logprobs: Literal["recorded", "recomputed"] = "recorded"
    """Old log-probs in the ratio. recorded: those of the engine that sampled. recomputed: those of the trainer's
    weights before the first update of the draw; take these when kernels, precision or lag make the two disagree."""
    importance: Literal["none", "truncated", "masked"] = "none"
    """Importance weight of a token: the ratio of its recomputed to its recorded probability (needs `logprobs =
    "recomputed"`). none: no weight. truncated: the ratio clamped to its bounds. masked: the ratio, with tokens outside
    the bounds masked."""
    importance_level: Literal["token", "product", "geometric"] = "token"
    """Level of the importance weight: the ratio of each token, or of the whole trajectory as the product or the
    geometric mean of its tokens' ratios."""
    importance_low: Bound = 0.0
    """Lower bound of the importance weight."""
    importance_high: Bound = 2.0
    """Upper bound of the importance weight."""
    normalize_importance: bool = False
    """Whether importance weights, limited to their bounds, are divided by their mean over the batch, so that the mean
    becomes 1. The mean is over tokens or, if importance_level is not token, over trajectories."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the KL divergence from the reference model; none computes no divergence."""
    kl_coefficient: Bound = 0.0
    """Coefficient of the KL divergence; at 0 it is only measured."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL divergence. loss: added to the loss of each token. reward: subtracted from the reward of each
    trajectory before the estimator compares it with others; under an estimator that compares none, subtracted from the
    advantage of each token, summed from the token to the end of its segment."""
    reference: str = ""
    """Hugging Face folder of the reference model; empty means the weights that training began with."""
    teacher: str = ""
    """Hugging Face folder of a teacher for on-policy distillation, of any size, with the policy's tokenizer. A token
    that the teacher finds likelier than the policy gets a positive advantage. opd requires it; with any other algorithm
    its advantages are added to the others. Empty: no teacher."""
    teacher_coefficient: Bound = 1.0
    """Factor of the teacher's log-prob minus the policy's in the advantage of a token; at 0 the difference is only
    measured."""
    entropy_coefficient: Bound = 0.0
    """Coefficient of the entropy, which is subtracted from the loss."""
    auxiliary: Annotated[str, Offered(EntryPointGroup.AUXILIARY_LOSSES, ("none", "imitate"), numbers=True)] = "none"
    """An auxiliary loss with a divisor of its own, followed by its parameters if it takes any. imitate:1 is the mean of
    -log p over the trained tokens of trajectories with a reward of at least 1."""
    auxiliary_coefficient: Bound = 0.1
    """Coefficient of the auxiliary loss."""
    discount: Share = 1.0
    """Discount factor of ppo, per trained token."""
    gae_lambda: Share = 1.0
    """Lambda of ppo's generalised advantage estimation. 1 credits a token with everything that its segment earns after
    it, 0 only with the critic's value of the next token."""
    whiten_advantages: bool = True
    """Whether ppo normalises advantages to mean 0 and standard deviation 1 over the trained tokens of each batch."""
    truncated: Literal["terminal", "bootstrap"] = "terminal"
    """Value that ppo assumes behind the last trained token of a truncated trajectory. terminal: 0. bootstrap: the
    critic's estimate there."""
    value_learning_rate: Rate = 1e-5
    """Learning rate of ppo's critic."""
    value_clip: Bound = 0.2
    """Maximum distance of a value from the one before the draw in the clipped squared error of ppo's critic; 0 does not
    clip."""
    value_updates: Count = 1
    """Number of updates of ppo's critic per batch."""
    value_warmup_steps: Amount = 0
    """Number of first steps of a new ppo critic, in which only the critic is updated."""


def check_learning(settings: object, learning: LearningSettings, source: str) -> None:
    """Raise SettingsError if choices in `learning`, the [trainer] section of `settings`, contradict each other."""
    name = learning.algorithm.partition(":")[0]
    check_wants(settings, name, WANTS.get(name, {}), source)
    if name == "dapo" and learning.clip_high <= learning.clip_low:
        raise SettingsError(
            f"{source}: trainer.algorithm is dapo and trainer.clip_high {learning.clip_high:g} is not above "
            f"trainer.clip_low {learning.clip_low:g}: set trainer.clip_high, to 0.28 as its authors do"
        )
    if name == "gspo" and max(learning.clip_low, learning.clip_high) > WIDEST_TRAJECTORY_CLIP:
        raise SettingsError(
            f"{source}: trainer.algorithm is gspo and its bounds are trainer.clip_low {learning.clip_low:g} and "
            f"trainer.clip_high {learning.clip_high:g}: the mean ratio of a trajectory hardly ever leaves "
            f"{WIDEST_TRAJECTORY_CLIP:g}, so that nothing would be clipped; set trainer.clip_low to 0.0003 and "
            "trainer.clip_high to 0.0004 as its authors do"
        )
    if name == "cispo" and learning.clip_low < 1:
        raise SettingsError(
            f"{source}: trainer.algorithm is cispo and trainer.clip_low is {learning.clip_low:g}: its weight has no "
            "lower bound; set trainer.clip_low to 1"
        )
    if name == "opd" and not learning.teacher:
        raise SettingsError(
            f"{source}: trainer.algorithm is opd and trainer.teacher is empty: set trainer.teacher to the Hugging Face "
            "folder of the model to learn from"
        )
    if 0 < learning.dual_clip <= 1:
        raise SettingsError(f"{source}: trainer.dual_clip must be 0 or above 1, got {learning.dual_clip:g}")
    if learning.importance != "none" and learning.logprobs == "recorded":
        raise SettingsError(
            f"{source}: trainer.importance is {learning.importance} and trainer.logprobs is recorded: the ratio is "
            "already taken against the engine, so its difference from the trainer would count twice; set "
            "trainer.logprobs to recomputed, or trainer.importance to none"
        )
    if learning.normalize_importance and learning.importance == "none":
        raise SettingsError(
            f"{source}: trainer.normalize_importance is true and trainer.importance is none: there are no weights; set "
            "trainer.importance to truncated or masked, or trainer.normalize_importance to false"
        )
    if learning.importance_low >= learning.importance_high:
        raise SettingsError(
            f"{source}: trainer.importance_low {learning.importance_low:g} must be below trainer.importance_high "
            f"{learning.importance_high:g}"
        )
    if learning.kl == "none" and (learning.kl_coefficient or learning.reference):
        key = "kl_coefficient" if learning.kl_coefficient else "reference"
        raise SettingsError(
            f"{source}: trainer.{key} is set and trainer.kl is none: set trainer.kl to k1, k2 or k3, or unset "
            f"trainer.{key}"
        )
    transforms = value_in(settings, "fold.reward_transforms")
    in_reward = learning.kl != "none" and learning.kl_coefficient and learning.kl_in == "reward"
    if in_reward and transforms and value_in(settings, "fold.estimator") == "grpo":
        raise SettingsError(
            f"{source}: trainer.kl_in is reward, fold.estimator is grpo and fold.reward_transforms is "
            f"{', '.join(transforms)}: grpo divides by the standard deviation of transformed rewards less their "
            "divergence, but batches have the rewards before they are transformed; set trainer.kl_in to loss, "
            "fold.estimator to dr_grpo or rloo, or transform rewards in the verifier"
        )


def value_in(settings: object, key: str) -> Any:
    """Return the value of `section.key` in the settings."""
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)


def check_wants(settings: object, algorithm: str, wants: Wants, source: str) -> None:
    """Raise SettingsError if a value in `settings` is not one that the algorithm is defined with."""
    for key, legal in wants.items():
        found = str(value_in(settings, key))
        if found not in legal:
            raise SettingsError(
                f"{source}: trainer.algorithm is {algorithm} and {key} is {found}: set {key} to {' or '.join(legal)}, "
                "or trainer.algorithm to another one"
            )
