"""What a step makes of its tokens: a part of [trainer], and which choices of it contradict each other.

The formulas are in docs/algorithms.md, the functions in turnlog.trainer.algorithms; here nothing imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

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
    "ppo": {"fold.estimator": ("none",)},
    "opd": {"fold.estimator": ("none",)},
}
"""By built-in algorithm."""
WIDEST_TRAJECTORY_CLIP = 0.05
"""Of gspo, whose authors take 3e-4 and 4e-4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSettings:
    """[trainer] What a step makes of its tokens."""

    algorithm: Annotated[str, Offered(EntryPointGroup.ALGORITHMS, tuple(WANTS), numbers=True)] = "grpo"
    """The loss of a token, with its numbers, if it takes any: sapo:1:1.05 (docs/algorithms.md)."""
    clip_low: Share = 0.2
    """The ratio of probabilities counts down to 1 - clip_low."""
    clip_high: Bound = 0.2
    """The ratio of probabilities counts up to 1 + clip_high."""
    dual_clip: Bound = 3.0
    """Where the advantage is negative, the ratio counts up to this, which is above 1; 0: as far as it goes. sapo and
    cispo bound it themselves, and take no notice."""
    logprobs: Literal["recorded", "recomputed"] = "recorded"
    """What ratios are taken against: log-probs of the engine, or of the weights before the draw's first update."""
    importance: Literal["none", "truncated", "masked"] = "none"
    """Recomputed over recorded probabilities as a weight: kept within its bounds, or tokens beyond them are masked."""
    importance_level: Literal["token", "product", "geometric"] = "token"
    """Of that weight: each token's own, or the trajectory's, as the product or the geometric mean of its tokens'."""
    importance_low: Bound = 0.0
    """Lower bound of that weight."""
    importance_high: Bound = 2.0
    """Upper bound of that weight."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the divergence from the reference."""
    kl_coefficient: Bound = 0.0
    """Of that estimate; at 0 it is measured alone."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it counts: token by token in the loss, or to go in the advantages."""
    reference: str = ""
    """Hugging Face folder that the divergence is taken from; empty is the weights that training began with."""
    teacher: str = ""
    """Hugging Face folder of a model with the policy's tokenizer, of any size: what it makes likelier than the policy
    does has an advantage. Needed by opd, beside the advantages of any other algorithm; empty is none."""
    teacher_coefficient: Bound = 1.0
    """Of the teacher's log-prob less the policy's, in the advantage of a token; at 0 it is measured alone."""
    entropy_coefficient: Bound = 0.0
    """Of the entropy, which is taken off the loss."""
    auxiliary: Annotated[str, Offered(EntryPointGroup.AUXILIARY_LOSSES, ("none", "imitate"), numbers=True)] = "none"
    """A loss beside that, with a divisor of its own, and its numbers, if it takes any: imitate:1 is the mean of -log p
    over the trained tokens of trajectories that earned 1 or more."""
    auxiliary_coefficient: Bound = 0.1
    """Of that loss."""
    discount: Share = 1.0
    """ppo: of what is earned a trained token later."""
    gae_lambda: Share = 1.0
    """ppo: 1 credits a token with all that its segment earns after it, 0 with what the critic says of the next one."""
    whiten_advantages: bool = True
    """ppo: to mean 0 and deviation 1 over the trained tokens of each batch."""
    truncated: Literal["terminal", "bootstrap"] = "terminal"
    """ppo: behind the last trained token of a truncated trajectory nothing is earned, or what the critic says."""
    value_learning_rate: Rate = 1e-5
    """ppo: of the critic."""
    value_clip: Bound = 0.2
    """ppo: the critic's squared error counts for values so far from those before the draw; 0 does not clip."""
    value_updates: Count = 1
    """ppo: of the critic, per batch."""
    value_warmup_steps: Amount = 0
    """ppo: first steps of a critic, which move it alone."""


def check_learning(settings: object, learning: LearningSettings, source: str) -> None:
    """Raises SettingsError for choices of `learning`, the [trainer] of `settings`, that contradict each other."""
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
            "taken against the engine already, and what parts it from the trainer would count twice; set "
            "trainer.logprobs to recomputed, or trainer.importance to none"
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


def check_wants(settings: object, algorithm: str, wants: Wants, source: str) -> None:
    """Raises SettingsError where `settings` are not those that the algorithm is defined with."""
    for key, legal in wants.items():
        section, _, name = key.partition(".")
        found = str(getattr(getattr(settings, section), name))
        if found not in legal:
            raise SettingsError(
                f"{source}: trainer.algorithm is {algorithm} and {key} is {found}: set {key} to {' or '.join(legal)}, "
                "or trainer.algorithm to another one"
            )
