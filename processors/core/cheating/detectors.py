"""The detectors by name, and what they find in one session.

A detector of a session is a pure function of the messages of its turns, so the assembler can apply it to what it folds
anyway. Detectors across sessions depend on which sessions came before, in whatever partition: they only report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from turnlog.processors.core.cheating.actions import SessionTrace
from turnlog.processors.core.cheating.clock import clock
from turnlog.processors.core.cheating.files import copied_answer, hidden_files, tests_touched, verifier_bypassed
from turnlog.processors.core.cheating.findings import Finding, storable
from turnlog.processors.core.cheating.history import git_history
from turnlog.processors.core.cheating.network import network_tried
from turnlog.processors.core.errors import BrokenMethod

MOST = 20
"""Maximum findings of one detector in one session."""


@dataclass(frozen=True, slots=True)
class CheatDetector:
    """A named detector. Raise its version whenever it finds something else: the records name both."""

    name: str
    version: int
    find: Callable[[SessionTrace], Iterable[Finding]]

    @property
    def label(self) -> str:
        """Label in GroupScored: name/version."""
        return f"{self.name}/{self.version}"


DETECTORS = (
    CheatDetector("tests_touched", 1, tests_touched),
    CheatDetector("verifier_bypassed", 1, verifier_bypassed),
    CheatDetector("hidden_files", 1, hidden_files),
    CheatDetector("copied_answer", 1, copied_answer),
    CheatDetector("git_history", 1, git_history),
    CheatDetector("network_tried", 1, network_tried),
    CheatDetector("clock", 1, clock),
)
ACROSS = ("reward_outlier", "identical_solutions", "clock_dependent")
"""Names of the detectors across sessions (`across.RunHistory`)."""
NAMES = (*(one.name for one in DETECTORS), *ACROSS)


def findings(session: SessionTrace, detectors: Sequence[CheatDetector] = DETECTORS) -> Iterator[Finding]:
    """Yield what detectors find in a session that was successful, at most MOST findings of each. Raises BrokenMethod
    if a detector returns something else, or raises.
    """
    for detector in detectors:
        try:
            for number, finding in enumerate(detector.find(session)):
                if number >= MOST:
                    break
                if not isinstance(finding, Finding):
                    raise TypeError(f"a {type(finding).__name__}, not a Finding")
                yield replace(
                    finding, says=storable(finding.says), call_id=storable(finding.call_id),
                    excerpt=storable(finding.excerpt),
                )  # fmt: skip
        except Exception as error:
            says = f"fails on session {session.session_id}: {type(error).__name__}: {error}"
            raise BrokenMethod(f"cheat detector {detector.label}", says) from error


def by_name(detectors: Iterable[CheatDetector] = DETECTORS) -> Mapping[str, CheatDetector]:
    """Return detectors by name."""
    return {one.name: one for one in detectors}
