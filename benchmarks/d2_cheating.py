"""D2: planted cheats that the detectors of cheating find, and false alarms per 1,000 honest sessions.

Sessions are records of the corpus tests/fakes/cheating: every kind of planted cheat in `SEEDS` variants among 2,000
honest sessions, which the detectors of sessions and those across sessions read in order. The goal: each kind of cheat
is found in every variant, with at most one false alarm per 1,000 honest sessions. The floor of the microseconds is
json.loads of the same messages. Not shown: cheats that nobody has planted here (docs/cheating.md).
usage: python benchmarks/d2_cheating.py
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict

from row import say, size, told

from tests.fakes.cheating.episodes import Episode, Told, records_of, trace_of
from tests.fakes.cheating.honest import honest
from tests.fakes.cheating.planted import planted
from turnlog.processors.core.cheating.across import RunHistory, summarize
from turnlog.processors.core.cheating.detectors import findings

HONEST, SEEDS = size((2000, 5), smallest=(100, 1))
MOST_FALSE = 1.0
"""False alarms per 1,000 honest sessions."""


def main() -> int:
    """Print the line."""
    episodes = [*honest(2026, HONEST), *(one for seed in range(SEEDS) for one in planted(seed))]
    sessions = [records_of(one, f"s{number}") for number, one in enumerate(episodes)]
    flagged, seconds = flags_of(sessions)
    by_name: dict[str, list[bool]] = defaultdict(list)
    alarms: Counter[str] = Counter()
    for one in sessions:
        if one.episode.cheats:
            by_name[one.episode.name].append(one.episode.cheats <= flagged[one.session_id])
        elif flagged[one.session_id]:
            alarms[one.episode.name] += 1
    found, planted_count = sum(map(sum, by_name.values())), sum(map(len, by_name.values()))
    missed = sorted(name for name, results in by_name.items() if not all(results))
    rate = 1000 * alarms.total() / sum(not one.episode.cheats for one in sessions)
    say(f"{found} of {planted_count} planted cheats of {len(by_name)} kinds found, missed: {missed or 'none'}")
    say(f"{rate:.2f} false alarms per 1,000 honest sessions: {dict(alarms) or 'none'}")
    per_session = 1e6 * seconds / len(sessions)
    bare = 1e6 * read_messages(sessions) / len(sessions)
    say(f"{per_session:.0f} us per session, of which reading the JSON takes {bare:.0f}")
    return told(
        id="D2", value=found / planted_count, unit="of planted cheats found", goal=1.0,
        met=found == planted_count and rate <= MOST_FALSE,
        detail={
            "kinds": len(by_name), "planted": planted_count, "found": found, "missed": missed,
            "honest": sum(not one.episode.cheats for one in sessions), "false_per_1000": round(rate, 3),
            "us_per_session": round(per_session, 1), "json_us_per_session": round(bare, 1),
            "turns_per_session": round(sum(len(one.turns) for one in sessions) / len(sessions), 2),
        },
    )  # fmt: skip


def flags_of(sessions: list[Told]) -> tuple[dict[str, set[str]], float]:
    """Return session -> names of the detectors that flag it, and the seconds that this took."""
    flagged: dict[str, set[str]] = {one.session_id: set() for one in sessions}
    history = RunHistory()
    began = time.perf_counter()
    for one in sessions:
        looked_at = trace_of(one)
        if _succeeded(one.episode):
            flagged[one.session_id].update(found.detector for found in findings(looked_at))
        for session_id, found in history.add(summarize(looked_at)):
            flagged[session_id].add(found.detector)
    return flagged, time.perf_counter() - began


def _succeeded(episode: Episode) -> bool:
    return episode.reward > 0


def read_messages(sessions: list[Told]) -> float:
    """Return the seconds that it takes to parse the messages alone."""
    began = time.perf_counter()
    for one in sessions:
        for turn in one.turns:
            json.loads(turn.new_messages)
            json.loads(turn.response)
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
