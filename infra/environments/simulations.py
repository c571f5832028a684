"""Environments that act in the runner's process, and how far an episode in one has come."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from turnlog.schemas.json_depth import deeper_than

NO_OBJECT = "the arguments are no JSON object"
"""Answer to a call whose arguments cannot be parsed."""
OVER = "the episode is over"
"""Answer to a call after the last step."""


def object_of(arguments: str) -> dict[str, Any] | None:
    """Parse the arguments that the model wrote. Returns None if they are not a JSON object."""
    try:
        values = None if deeper_than(arguments) else json.loads(arguments)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


@dataclass(frozen=True, slots=True)
class Step:
    """The result of an action in a simulation."""

    observation: Any
    reward: float = 0.0
    done: bool = False
    """True if no further action is possible: the session ends once the model has received the observation."""


class Simulation(Protocol):
    """An episode of an environment that runs in the runner's process.

    It must be deterministic on any machine: the same task and actions give the same steps. A new owner of the session,
    and its verifier, repeat the actions to restore its state.
    """

    def reset(self) -> Any:
        """Return the first observation."""
        ...

    def step(self, name: str, arguments: dict[str, Any]) -> Step:
        """Run a call of the tool `name`. Answer mistakes of the model by an observation; an exception is a fault of
        the recipe."""
        ...

    def format_observation(self, observation: Any) -> Any:
        """Return the content of a chat message: text, or OpenAI's content blocks."""
        ...


class Played:
    """A simulation and its progress."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.first = simulation.format_observation(simulation.reset())
        """First observation, which the model receives before it acts."""
        self.rewards: list[float] = []
        """Reward of each step."""
        self.done = False

    def call(self, name: str, arguments: str) -> Any:
        """Return the content of the tool message for a call. `arguments` is the JSON text that the model wrote."""
        values = object_of(arguments)
        return (OVER if self.done else NO_OBJECT) if values is None else self.act(name, values)

    def act(self, name: str, arguments: dict[str, Any]) -> Any:
        """Take one action, and return the content of the message that answers it."""
        if self.done:
            return OVER
        step = self._simulation.step(name, arguments)
        self.rewards.append(float(step.reward))
        self.done = step.done
        return self._simulation.format_observation(step.observation)
