"""What rollouts may sample with. Only temperature and limits exist: the engine logs log-probs of the whole softmax at
that temperature, so top-p, top-k, penalties and greedy decoding could not be trained on (and cannot be set).

BadSampling: names the setting, its value and what is legal.
"""

from __future__ import annotations

from turnlog.infra.methods import installed
from turnlog.processors.core.methods.rules import fold_rules
from turnlog.schemas.events import Limits, Sampling
from turnlog.settings import Settings


class BadSampling(Exception):
    """A [feeder] setting with which no group could ever be trained."""


def checked_sampling(settings: Settings) -> tuple[Sampling, Limits]:
    """The policy's sampling parameters and a live agent's limits. Raises BadSampling, SettingsError."""
    feeder = settings.feeder
    least = fold_rules(settings.fold, run_id="", settings_sha256="", methods=installed(settings.fold)).least_valid
    _require(
        feeder.group_size >= least,
        "feeder.group_size",
        feeder.group_size,
        f"at least {least}, as fold.min_valid or the estimator {settings.fold.estimator!r} says, or every group is "
        "discarded and drawn again for ever",
    )
    _require(
        feeder.max_context_tokens <= settings.engine.context,
        "feeder.max_context_tokens",
        feeder.max_context_tokens,
        f"at most engine.context ({settings.engine.context})",
    )
    return (
        Sampling(temperature=feeder.temperature, max_new_tokens=feeder.max_new_tokens),
        Limits(max_turns=feeder.max_turns, max_context_tokens=feeder.max_context_tokens, deadline_s=feeder.deadline_s),
    )


def _require(holds: bool, key: str, value: object, legal: str) -> None:
    if not holds:
        raise BadSampling(f"{key} = {value!r}: it must be {legal}")
