"""Settings of redaction: what no record may hold, and what becomes of tokens that show it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from turnlog.setting_types import SettingsError

Kind = Literal[
    "known",
    "private_key",
    "cloud_key",
    "token",
    "jwt",
    "password",
    "random",
    "email",
    "phone",
    "iban",
    "card",
    "ip",
    "national_id",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds that rules can find, the most specific first: where two overlap, the earlier kind wins."""
OWN_KIND = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedactionSettings:
    """[redaction] Secrets and personal data that no record may hold (docs/redaction.md)."""

    inputs: Literal["off", "mask", "drop"] = "off"
    """Prompts, tool results, tasks and verdicts. off: they are recorded as they are. mask: a secret is replaced before
    the engine sees it, so that the recorded tokens are those that the model saw, and train. drop: the model sees what
    the client sent, records hold the masked text and none of the turn's tokens, and the sample is dropped (`redacted`).
    """
    outputs: Literal["off", "drop"] = "off"
    """Answers of the policy. off: they are recorded as they are. drop: the client gets the text as it was sampled,
    records hold the masked text and none of the turn's output tokens, and the sample is dropped (`redacted`). Required
    if `inputs` is drop, since a model that sees a secret may repeat it."""
    kinds: tuple[Kind, ...] = KINDS[:-2]
    """Kinds that are looked for. The run's own secrets (known) are always looked for."""
    patterns: tuple[str, ...] = ()
    """Kinds of your own, NAME=REGULAR_EXPRESSION each. The last group that took part is the secret, or the whole match
    if there are no groups."""
    phone_regions: tuple[str, ...] = ("US",)
    """Countries (two letters, ISO 3166) whose telephone numbers are recognised without a country code."""
    known_variables: tuple[str, ...] = ()
    """Names of environment variables of the roles whose values are secrets. Values of settings that are secrets, and of
    their files, always are."""

    @property
    def own(self) -> Mapping[str, str]:
        """The kinds of `patterns`, with their regular expressions."""
        return {name: pattern for name, _, pattern in (one.partition("=") for one in self.patterns)}


def check_redaction(redaction: RedactionSettings, source: str) -> None:
    """Raise SettingsError for patterns that cannot be used, and for inputs that outputs would give away."""
    for one in redaction.patterns:
        name, _, pattern = one.partition("=")
        if not OWN_KIND.fullmatch(name) or not pattern or name in KINDS:
            raise SettingsError(
                f"{source}: redaction.patterns must be NAME=REGULAR_EXPRESSION each, with a name of small letters, "
                f"digits and _ that is none of {', '.join(KINDS)}, got {one!r}"
            )
        try:
            empty = re.compile(pattern).match("")
        except re.error as error:
            raise SettingsError(f"{source}: redaction.patterns: {name} is no regular expression: {error}") from error
        if empty:
            raise SettingsError(f"{source}: redaction.patterns: {name} matches the empty text: let it need a character")
    if redaction.inputs == "drop" and redaction.outputs == "off":
        raise SettingsError(
            f"{source}: redaction.inputs is drop and redaction.outputs is off: the model sees secrets and may repeat "
            "them into records; set redaction.outputs to drop, or redaction.inputs to mask"
        )
    for region in redaction.phone_regions:
        if not re.fullmatch("[A-Z]{2}", region):
            raise SettingsError(
                f"{source}: redaction.phone_regions must be two capital letters each, such as US, got {region!r}"
            )
