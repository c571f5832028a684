"""Findings of detectors: name, severity, and the turn or tool call that shows it, with a short excerpt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from turnlog.schemas.types import TurnId

EXCERPT = 160
"""Maximum characters of an excerpt."""
SECRETS = re.compile(
    r"(?i)\b(?:sk|pk|rk|ghp|gho|ghs|github_pat|glpat|hf|xox[abp]|AKIA|AIza|eyJ)[-_]?[A-Za-z0-9_.\-]{12,}"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
    r"|\b(?:bearer|basic)\s+[A-Za-z0-9+/._=\-]{8,}"
    r"|(?<![\w-])(?=[\w-]*(?:api[_-]?key|token|secret|passw(?:or)?d|authorization|credential))[\w-]+[\"']?\s*[=:]\s*"
    r"(?:(?:bearer|basic)\s+)?(?:\"[^\"\n]*\"?|'[^'\n]*'?|\S+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
    r"|(?:(?<![A-Za-z0-9+/=])[A-Za-z0-9+/=]{60,76}(?:\s+|$))+[A-Za-z0-9+/=]*"  # the middle of such a key
)
"""Texts that look like keys, passwords and tokens."""
HIDDEN_SECRET = "[secret]"


class Severity(StrEnum):
    """Likelihood that the success was not earned."""

    medium = "medium"
    """The success can have another reason; a person must look."""
    high = "high"
    """The records show the act itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A suspicion about one session that was rewarded."""

    detector: str
    """Name of the detector."""
    severity: Severity
    says: str
    """The finding in one sentence."""
    turn: TurnId | None = None
    """Turn that shows it; None if the session as a whole does."""
    call_id: str = ""
    """Tool call that shows it; empty for an act that is no tool call."""
    excerpt: str = ""
    """The part of the record that shows it, without secrets; at most EXCERPT characters."""


def storable(text: str) -> str:
    """Return a text of at most two excerpts' length, without lone surrogates, which no database stores."""
    return text[: 2 * EXCERPT].encode(errors="replace").decode()


def excerpt_of(text: str, start: int = 0) -> str:
    """Return a part of a text from shortly before `start` on, on one line and with secrets replaced."""
    begin = max(start - EXCERPT // 4, 0)
    # Secrets are replaced before the cut, because half of a secret would not be recognized.
    around = SECRETS.sub(HIDDEN_SECRET, text[max(begin - 512, 0) : begin + EXCERPT + 512])
    skipped = len(SECRETS.sub(HIDDEN_SECRET, text[max(begin - 512, 0) : begin]))
    line = " ".join(around[skipped:].encode(errors="replace").decode().split())  # lone surrogates cannot be stored
    return line if len(line) <= EXCERPT else line[: EXCERPT - 1] + "…"
