"""Spellings of verbs that moved below `turnlog log` and `turnlog role`. They work until version 0.3.0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from turnlog.verbs.verb import Verb

VALUED = ("--settings", "--run")
"""Options before the verb that take a value."""
ACTIONS = {
    "archive": {"flush", "status", "prune"},
    "index": {"build"},
    "sandbox": {"pool", "check", "exec"},
    "trainer": {"plan"},
}
"""Verbs that were a role without an action, and the actions with which they were none."""


def modern_words(words: Sequence[str], verbs: Iterable[Verb]) -> tuple[list[str], str]:
    """Return the command line in today's spelling, and a hint, which is empty if it had that already."""
    at = _place_of_verb(words)
    name, rest = "".join(words[at : at + 1]), list(words[at + 1 :])
    home = _home(name, rest, {verb.under for verb in verbs if verb.name == name})
    if not home:
        return list(words), ""
    if home == "role" and name in ACTIONS:
        rest = _without_action(rest)
    return [
        *words[:at],
        home,
        name,
        *rest,
    ], f"`turnlog {name}` is now `turnlog {home} {name}`; 0.3.0 drops the old name"


def _place_of_verb(words: Sequence[str]) -> int:
    """Return the index of the first word that is neither an option nor the value of one."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 2 if len(words[at]) > 2 and any(option.startswith(words[at]) for option in VALUED) else 1
    return at


def _home(name: str, rest: Sequence[str], homes: set[str]) -> str:
    """Return the verb below which `name` stands now, or "" if it did not move."""
    acts = bool(ACTIONS.get(name, set()) & {*rest})
    if name in ("sandbox", "trainer"):  # of which only the role moved
        return "" if acts or {"-h", "--help"} & {*rest} else "role"
    if homes == {"log", "role"}:
        return "log" if acts else "role"
    return "" if "" in homes else "".join(homes)


def _without_action(rest: Sequence[str]) -> list[str]:
    """Drop the action `run` and the option --from, which the role has no use for."""
    return [
        word
        for before, word in pairwise(("", *rest))
        if not (word == "run" and not before.startswith("-")) and before != "--from" and not word.startswith("--from")
    ]
