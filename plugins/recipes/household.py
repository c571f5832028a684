"""Environment `household`: a text game. Find a thing in a house, of which only the current place is visible, and put it
where it belongs.

The reward is 1 iff the thing is there within the turns of a session ([feeder] max_turns = 8). There are millions of
tasks, which differ in places, things and where the things lie. A demonstration takes a random action in about every
third step, and so wastes its turns.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any, Final

from turnlog.environments import (
    Demonstration,
    Episode,
    FunctionVerifier,
    Message,
    Played,
    Recipe,
    Step,
    TaskRow,
    Verdict,
    played,
)
from turnlog.plugins.recipes.warm_start import TinyWarmStart, demonstrate_call, imitating, solving_call

PLACES: Final = ("bed", "desk", "fridge", "shelf", "sink", "sofa")
THINGS: Final = ("apple", "book", "cup", "key", "lamp", "pen", "plate", "soap")
SHOWN: Final = 4
"""Number of places in a house."""
ERRS: Final = 0.35
"""Share of a demonstration's steps that are random."""
TURNS: Final = 8
"""Maximum number of turns of a demonstration."""


def task_row(generator: random.Random) -> dict[str, Any]:
    """Return a task: which thing to put where, and where all things lie."""
    places = generator.sample(PLACES, SHOWN)
    things = generator.sample(THINGS, SHOWN)
    lies = {thing: generator.choice(places) for thing in things}
    thing = generator.choice(things)
    goal = generator.choice([place for place in places if place != lies[thing]])
    prompt = f"put {thing} in {goal}. places: {', '.join(sorted(places))}"
    return {"prompt": prompt, "thing": thing, "goal": goal, "places": sorted(places), "lies": lies}


class House:
    """See turnlog.infra.environments.recipes.Simulation. An observation is text."""

    def __init__(self, task: TaskRow) -> None:
        self._task = task
        self._lies: dict[str, str] = dict(task["lies"])
        self._at, self._held = "", ""

    def reset(self) -> str:
        """Return the prompt; nothing is visible before the first place."""
        return str(self._task["prompt"])

    def step(self, name: str, arguments: dict[str, Any]) -> Step:
        """Carry out `do`: go PLACE, take THING or put THING."""
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
        """Return the observation unchanged."""
        return str(observation)

    def _seen(self) -> str:
        here = sorted(thing for thing, place in self._lies.items() if place == self._at)
        return f"{self._at}: {', '.join(here) or 'nothing'}"


def good_action(task: TaskRow, seen: list[str], generator: random.Random) -> str:
    """Return the next step towards the goal, given the observations: visit new places until the thing is there."""
    held, last = f"you have {task['thing']}" in seen, seen[-1]
    if held:
        return f"put {task['thing']}" if last.startswith(f"{task['goal']}:") else f"go {task['goal']}"
    if ":" in last and task["thing"] in last:
        return f"take {task['thing']}"
    known = {observation.partition(":")[0] for observation in seen}
    found = [said.partition(":")[0] for said in seen if ":" in said and task["thing"] in said]
    return f"go {(found or generator.sample([place for place in task['places'] if place not in known], 1))[-1]}"


def any_action(task: TaskRow, generator: random.Random) -> str:
    """Return a random well-formed action."""
    thing = generator.choice(sorted(task["lies"]))
    return generator.choice([f"go {generator.choice(task['places'])}", f"take {thing}", f"put {thing}"])


def demonstration(generator: random.Random) -> Demonstration:
    """Return a conversation."""
    task = task_row(generator)
    house, seen = Played(House(task)), [""]
    messages: list[Message] = [{"role": "user", "content": task["prompt"]}]
    while not house.done and len(seen) <= TURNS:
        good = good_action(task, seen, generator)
        action = any_action(task, generator) if generator.random() < ERRS else good
        seen.append(house.call("act", json.dumps({"do": action})))
        messages += demonstrate_call("act", {"do": action}, seen[-1])
    return imitating(messages)


def judge(episode: Episode) -> Verdict:
    """Return the sum of the game's rewards, by playing it again."""
    game = played(RECIPE, episode.task, episode.messages)
    assert game is not None
    steps = len(game.rewards)
    return Verdict(
        math.fsum(game.rewards), {"solved": float(game.done), "steps": float(steps)}, {"rewards": game.rewards}
    )


class Household(Recipe):
    """See the module's docstring and turnlog.infra.environments.recipes.Recipe."""

    name = "household"
    verifier = FunctionVerifier("household", "1", judge)
    simulation = House
    warm_start = TinyWarmStart(demonstration, "|".join(PLACES + THINGS), vocabulary=416)

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Schema of the only function, `act(do)`."""
        parameters = {"type": "object", "properties": {"do": {"type": "string"}}, "required": ["do"]}
        about = "go PLACE, take THING or put THING."
        return ({"type": "function", "function": {"name": "act", "description": about, "parameters": parameters}},)

    def solution(self, task: TaskRow) -> list[Message]:
        """Return the shortest way: fetch the thing from where it lies, and put it where it belongs."""
        thing = task["thing"]
        ways = (f"go {task['lies'][thing]}", f"take {thing}", f"go {task['goal']}", f"put {thing}")
        return [solving_call("act", {"do": way}) for way in ways]

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield fresh random tasks forever."""
        generator = random.Random(f"household tasks {seed}")
        while True:
            yield task_row(generator)


RECIPE: Final = Household()
