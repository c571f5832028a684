"""Environment `question`: questions of two or three hops over a small library, which is searched by BM25 (Robertson and
Zaragoza, 2009) in the runner's process.

The reward is 1 iff the last message is the answer, or ends with it after `Answer:`. The library is generated, and the
same on every machine, so earlier knowledge of a model does not help, and each hop needs the result of the one before.
In a demonstration, most hops after the first answer too early or ask a random question about a name, so a warm-started
policy is right in three of ten.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

from turnlog.environments import (
    Demonstration,
    Episode,
    FunctionVerifier,
    Message,
    Recipe,
    SandboxCall,
    TaskRow,
    Verdict,
)
from turnlog.infra.environments.simulations import object_of
from turnlog.plugins.recipes.warm_start import TinyWarmStart, demonstrate_call, imitating
from turnlog.schemas.events.sessions import Outcome

PEOPLE: Final = 240
TOWNS: Final = 60
RIVERS: Final = 30
FOUND: Final = 3
"""Number of documents that a search returns."""
QUERY_CHARS: Final = 400
"""Number of characters of a query that are read."""
ASKS: Final = 'search takes {"query": "words"}'
HOW: Final = (
    "Search the library, one fact at a time. End with a line that holds `Answer:` and the name, and nothing else."
)
SYLLABLES: Final = ("bra", "dor", "fen", "gal", "hes", "kir", "lom", "mar", "nev", "ost", "pel", "run", "sil", "tor")
ENDS: Final = ("a", "en", "is", "o", "um", "ia", "ar", "et")


def _names(generator: random.Random, count: int, taken: set[str]) -> list[str]:
    """Return made-up names, all different."""
    found: list[str] = []
    while len(found) < count:
        name = "".join(map(generator.choice, (SYLLABLES, ("", *SYLLABLES), ENDS))).capitalize()
        if name not in taken:
            taken.add(name)
            found.append(name)
    return found


@dataclass(frozen=True)
class FactLibrary:
    """Facts: who was born where and taught whom, who wrote what, and on which river a town lies."""

    town_of: dict[str, str]
    author_of: dict[str, str]
    teacher_of: dict[str, str]
    river_of: dict[str, str]

    @cached_property
    def documents(self) -> tuple[str, ...]:
        """Documents, with one fact each."""
        return (
            *(f"{person} was born in the town of {town}." for person, town in self.town_of.items()),
            *(f"The book '{book}' was written by {author}." for book, author in self.author_of.items()),
            *(f"{person} was a pupil of {teacher}." for person, teacher in self.teacher_of.items()),
            *(f"The town of {town} lies on the river {river}." for town, river in self.river_of.items()),
        )

    @cached_property
    def _index(self) -> Any:
        try:
            import bm25s
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("recipe 'question' needs its search: pip install turnlog[question]") from error
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        index = bm25s.BM25()
        index.index([_words(document) for document in self.documents], show_progress=False)
        return index

    def search(self, query: str) -> list[str]:
        """Return the documents that match best, the best first; none that shares no word with the query."""
        words = _words(query[:QUERY_CHARS])
        if not any(word in self._index.vocab_dict for word in words):
            return []
        places, scores = self._index.retrieve([words], k=FOUND, show_progress=False)
        return [self.documents[place] for place, score in zip(places[0], scores[0], strict=True) if score > 0]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@cache
def library() -> FactLibrary:
    """Return the library that every session searches."""
    generator, taken = random.Random("question library"), set[str]()
    people, towns = _names(generator, PEOPLE, taken), _names(generator, TOWNS, taken)
    rivers, books = _names(generator, RIVERS, taken), _names(generator, PEOPLE, taken)
    return FactLibrary(
        town_of={person: generator.choice(towns) for person in people},
        author_of={f"The {book} Letters": person for book, person in zip(books, people, strict=True)},
        teacher_of={person: generator.choice([other for other in people if other != person]) for person in people},
        river_of={town: generator.choice(rivers) for town in towns},
    )


def _birthplace(known: FactLibrary, book: str) -> tuple[str, list[str]]:
    author = known.author_of[book]
    return f"In which town was the author of '{book}' born?", [author, known.town_of[author]]


def _teacher(known: FactLibrary, book: str) -> tuple[str, list[str]]:
    author = known.author_of[book]
    return f"Who was the teacher of the author of '{book}'?", [author, known.teacher_of[author]]


def _river(known: FactLibrary, book: str) -> tuple[str, list[str]]:
    author = known.author_of[book]
    town = known.town_of[author]
    asked = f"On which river lies the town where the author of '{book}' was born?"
    return asked, [author, town, known.river_of[town]]


def _teachers_town(known: FactLibrary, book: str) -> tuple[str, list[str]]:
    author = known.author_of[book]
    teacher = known.teacher_of[author]
    return f"In which town was the teacher of the author of '{book}' born?", [author, teacher, known.town_of[teacher]]


KINDS: Final[dict[Callable[[FactLibrary, str], tuple[str, list[str]]], tuple[str, ...]]] = {
    _birthplace: ("book", "born"),
    _teacher: ("book", "pupil"),
    _river: ("book", "born", "river"),
    _teachers_town: ("book", "pupil", "born"),
}
"""Kind of question -> the word that a good search uses for each name on the way."""


def task_row(generator: random.Random) -> dict[str, Any]:
    """Return a question, with the names that lead to its answer, which is the last of them."""
    known = library()
    asked, hops = generator.choice([*KINDS])(known, generator.choice(list(known.author_of)))
    return {"prompt": f"{asked}\n{HOW}", "answer": hops[-1], "hops": hops}


EARLY, ERRS = 0.3, 0.5
"""Shares of the hops of a demonstration: those that answer too early, and those that ask a random question."""


def demonstration(generator: random.Random) -> Demonstration:
    """Return a conversation."""
    known, kind = library(), generator.choice([*KINDS])
    book = generator.choice([*known.author_of])
    asked, _ = kind(known, book)
    messages: list[Message] = [{"role": "user", "content": f"{asked}\n{HOW}"}]
    name = book.split()[1]
    for hop, right in enumerate(KINDS[kind]):
        if hop and generator.random() < EARLY:
            break
        sought = generator.choice(("born", "pupil", "river")) if hop and generator.random() < ERRS else right
        query = f"{name} {sought}"
        documents = known.search(query)
        messages += demonstrate_call("search", {"query": query}, "\n".join(documents))
        name = documents[0].rstrip(".").split()[-1]
    messages.append({"role": "assistant", "content": f"Answer: {name}"})
    return imitating(messages)


def judge(episode: Episode) -> Verdict:
    """Return 1.0 iff the last message of a completed session gives the answer. The share of the hops that were found is
    a component without weight."""
    last = episode.messages[-1]
    said = str(last.get("content") or "") if last["role"] == "assistant" and not last.get("tool_calls") else ""
    answer = said.rpartition("Answer:")[2].strip().rstrip(".")
    right = episode.outcome is Outcome.completed and answer.casefold() == episode.task["answer"].casefold()
    told = "\n".join(str(message["content"]) for message in episode.messages if message["role"] == "tool")
    hops: list[str] = episode.task["hops"]
    found = sum(re.search(rf"\b{re.escape(hop)}\b", told) is not None for hop in hops) / len(hops)
    searches = sum(message["role"] == "tool" for message in episode.messages)
    evidence = {"said": said[-400:], "answer": episode.task["answer"], "outcome": episode.outcome.value}
    return Verdict(float(right), {"hops_found": found, "searches": float(searches)}, evidence)


class Question(Recipe):
    """See the module's docstring and turnlog.infra.environments.recipes.Recipe."""

    name = "question"
    verifier = FunctionVerifier("question", "1", judge)
    warm_start = TinyWarmStart(demonstration, "[A-Z][a-z]+", vocabulary=1400)

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Schema of the only function, `search(query)`."""
        parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
        about = f"The {FOUND} documents of the library that fit the query best."
        return ({"type": "function", "function": {"name": "search", "description": about, "parameters": parameters}},)

    def tool_call(self, name: str, arguments: str) -> SandboxCall | str:
        """Return the answer at once; a search needs no sandbox."""
        query = (object_of(arguments) or {}).get("query")
        if name != "search" or not isinstance(query, str):
            return ASKS
        return "\n".join(library().search(query)) or "nothing fits"

    def solution(self, task: TaskRow) -> list[Message]:
        """Return the answer."""
        return [{"role": "assistant", "content": f"Answer: {task['answer']}"}]

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield fresh random questions forever."""
        generator = random.Random(f"question tasks {seed}")
        while True:
            yield task_row(generator)


RECIPE: Final = Question()
