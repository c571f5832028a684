"""Recipe `household`: a game in words. Find a thing in a house, of which one sees only the place where one stands, and
put it where it belongs.

Reward 1 iff it is there within the turns of a session ([feeder] max_turns = 8). There are millions of tasks: which
places, which things, where they lie. A demonstration does anything at every third step, and so wastes its turns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, Final

from turnlog.infra.recipes import (
    Demonstration,
    Episode,
    FunctionVerifier,
    Message,
    PlainRecipe,
    Played,
    Step,
    TaskRow,
    Verdict,
    played,
)
from turnlog.producers.recipes.warm_start import TinyWarmStart, called, imitating

PLACES: Final = ("bed", "desk", "fridge", "shelf", "sink", "sofa")
THINGS: Final = ("apple", "book", "cup", "key", "lamp", "pen", "plate", "soap")
SHOWN: Final = 4
"""Places of a house."""
ERRS: Final = 0.35
"""Share of a demonstration's steps that are anything."""
TURNS: Final = 8
"""Of a demonstration, at most."""


def task_row(generator: random.Random) -> dict[str, Any]:
    """One task: what to put where, and what lies where."""
    places = generator.sample(PLACES, SHOWN)
    things = generator.sample(THINGS, SHOWN)
    lies = {thing: generator.choice(places) for thing in things}
    thing = generator.choice(things)
    goal = generator.choice([place for place in places if place != lies[thing]])
    prompt = f"put {thing} in {goal}. places: {', '.join(sorted(places))}"
    return {"prompt": prompt, "thing": thing, "goal": goal, "places": sorted(places), "lies": lies}


class House:
    """See turnlog.infra.recipes.Simulation. An observation is a text."""

    def __init__(self, task: TaskRow) -> None:
        self._task = task
        self._lies: dict[str, str] = dict(task["lies"])
        self._at, self._held = "", ""

    def reset(self) -> str:
        """Nothing is seen before the first place."""
        return str(self._task["prompt"])

    def step(self, name: str, arguments: dict[str, Any]) -> Step:
        """`do`: go PLACE, take THING, put THING."""
        verb, _, what = str(arguments.get("do", "")).partition(" ")
        if name == "act" and verb == "go" and what in self._task["places"]:
            self._at = what
            return Step(self._seen())
        if name == "act" and verb == "take" and not self._held and self._lies.get(what) == self._at:
            self._held = what
            del self._lies[what]
            return Step(f"you have {what}")
        if name == "act" and verb == "put" and what == self._held and self._at:
            self._held, self._lies[what] = "", self._at
            done = (what, self._at) == (self._task["thing"], self._task["goal"])
            return Step("done" if done else self._seen(), float(done), done)
        return Step("no")

    def format_observation(self, observation: Any) -> str:
        """As it is."""
        return str(observation)

    def _seen(self) -> str:
        here = sorted(thing for thing, place in self._lies.items() if place == self._at)
        return f"{self._at}: {', '.join(here) or 'nothing'}"


def good_action(task: TaskRow, seen: list[str], generator: random.Random) -> str:
    """The next step towards the goal, by what was seen: look into a new place until the thing is there."""
    held, last = f"you have {task['thing']}" in seen, seen[-1]
    if held:
        return f"put {task['thing']}" if last.startswith(f"{task['goal']}:") else f"go {task['goal']}"
    if ":" in last and task["thing"] in last:
        return f"take {task['thing']}"
    known = {observation.partition(":")[0] for observation in seen}
    found = [said.partition(":")[0] for said in seen if ":" in said and task["thing"] in said]
    return f"go {(found or generator.sample([place for place in task['places'] if place not in known], 1))[-1]}"


def any_action(task: TaskRow, generator: random.Random) -> str:
    """Well-formed, and nothing more."""
    thing = generator.choice(sorted(task["lies"]))
    return generator.choice([f"go {generator.choice(task['places'])}", f"take {thing}", f"put {thing}"])


def demonstration(generator: random.Random) -> Demonstration:
    """One conversation."""
    task = task_row(generator)
    house, seen = Played(House(task)), [""]
    messages: list[Message] = [{"role": "user", "content": task["prompt"]}]
    while not house.done and len(seen) <= TURNS:
        good = good_action(task, seen, generator)
        action = any_action(task, generator) if generator.random() < ERRS else good
        seen.append(house.call("act", json.dumps({"do": action})))
        messages += called("act", {"do": action}, seen[-1])
    return imitating(messages)


def judge(episode: Episode) -> Verdict:
    """What the steps of the game came to, played again."""
    game = played(RECIPE, episode.task, episode.messages)
    assert game is not None
    steps = len(game.rewards)
    return Verdict(sum(game.rewards), {"solved": float(game.done), "steps": float(steps)}, {"rewards": game.rewards})


class Household(PlainRecipe):
    """See the module's docstring and turnlog.infra.recipes.Recipe."""

    name = "household"
    verifier = FunctionVerifier("household", "1", judge)
    simulation = House
    warm_start = TinyWarmStart(demonstration, "|".join(PLACES + THINGS), vocabulary=416)

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """One function, `act(do)`."""
        parameters = {"type": "object", "properties": {"do": {"type": "string"}}, "required": ["do"]}
        about = "go PLACE, take THING or put THING."
        return ({"type": "function", "function": {"name": "act", "description": about, "parameters": parameters}},)

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Fresh random tasks for ever."""
        generator = random.Random(f"household tasks {seed}")
        while True:
            yield task_row(generator)


RECIPE: Final = Household()
