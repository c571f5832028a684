"""D1: secrets found in a corpus of planted ones, turns without secrets in which some are found, and time per kilobyte.

500 secrets of 18 forms are planted in settings, code, JSON, shell output, logs and prose, and 1,000 honest turns hold
what looks like secrets (hashes, lockfiles, certificates, images in base64, code about passwords). Both are made from a
seed that no rule was written for. Floor in the same run: detect-secrets as it is, all its plugins on every line of the
first of these texts. Times are CPU time of one core. The value is the recall of ours.
usage: python benchmarks/d1_redaction.py
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from detect_secrets.core.scan import get_plugins
from detect_secrets.settings import default_settings
from row import say, size, told

from tests.fakes.planted_secrets import Corpus
from turnlog.infra.redaction.masking import Masker
from turnlog.infra.redaction.scanner import Scanner
from turnlog.redaction_settings import KINDS

SEED = 2039
PLANTED, HONEST = size((500, 1000), smallest=(36, 36))
REPEATS = size(3, smallest=1)
BESIDE = size(72, smallest=18)
"""Planted texts, and as many honest ones, that the library scans, which takes milliseconds for each."""
GOAL = 0.95
MOST_FALSE = 10
"""Honest turns of a thousand in which something may be found."""


def library(text: str) -> Iterator[str]:
    """What detect-secrets finds in each line, as in a file."""
    for line in text.splitlines():
        for plugin in get_plugins():
            for found in plugin.analyze_line(filename="text.txt", line=line, line_number=1):
                if found.secret_value:
                    yield found.secret_value


def us_per_kb(texts: list[str], scan: Callable[[str], object], repeats: int = REPEATS) -> float:
    """CPU microseconds for a kilobyte, the least of some repeats."""
    kilobytes, best = sum(len(text.encode()) for text in texts) / 1024, float("inf")
    for _ in range(repeats):
        began = time.process_time()
        for text in texts:
            scan(text)
        best = min(best, time.process_time() - began)
    return best * 1e6 / kilobytes


def main() -> int:
    """Print the line."""
    corpus = Corpus(SEED)
    planted, honest = corpus.planted(PLANTED), corpus.honest(HONEST)
    texts = [one.text for one in planted] + honest
    missed: Counter[str] = Counter()
    scanner = Scanner(KINDS[:-2])
    for one in planted:
        missed[one.kind] += one.secret in Masker(scanner).text(one.text)
    false = sum(bool(scanner.find(text)) for text in honest)
    recall = 1 - missed.total() / len(planted)
    say(f"recall {recall:.3f}, {false} of {len(honest)} honest turns")
    ours = us_per_kb(texts, lambda text: scanner.forgetting().find(text))
    known = us_per_kb(texts, scanner.find)
    with default_settings():
        few, clean = planted[:BESIDE], honest[:BESIDE]
        theirs = sum(any(value in one.secret for value in library(one.text)) for one in few) / len(few)
        their_false = sum(any(library(text)) for text in clean) / len(clean)
        floor_us = us_per_kb([one.text for one in few] + clean, lambda text: list(library(text)), repeats=1)
    return told(
        id="D1", value=recall, unit="recall", goal=GOAL, floor=theirs, rate=True,
        met=recall >= GOAL and false <= MOST_FALSE * len(honest) / 1000,
        detail={
            "planted": len(planted), "honest_turns": len(honest), "missed": dict(missed),
            "false_per_1000_turns": round(1000 * false / len(honest), 2), "us_per_kb": round(ours, 1),
            "us_per_kb_of_text_seen_before": round(known, 2), "library_recall": round(theirs, 3),
            "library_false_per_1000_turns": round(1000 * their_false),
            "library_us_per_kb": round(floor_us, 1), "floor_is": "detect-secrets as it is, all plugins on each line",
        },
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
