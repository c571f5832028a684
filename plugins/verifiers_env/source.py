"""The task source `verifiers`: tasks, episodes and rewards of an environment package of Prime Intellect's verifiers.

The environment plays an episode in its own process (process.py, driver.py), and requests its turns from the gateway. To
the runner this is an agent that is a function: what it returns is the reward.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from turnlog.environments import (
    AgentSession,
    BadSource,
    Episode,
    FunctionAgent,
    FunctionVerifier,
    Recipe,
    Task,
    TaskRow,
    TruncatedRun,
    Verdict,
)
from turnlog.infra.environments.episodes import add_rewards
from turnlog.plugins.verifiers_env.process import EnvironmentOptions, EnvironmentProcesses, task_rows
from turnlog.schemas.events.sessions import Environment

NO_REWARD = "no_reward_assigned"
"""Name of the component that is NaN if the environment assigned no reward, so that the failed reward says why."""


REFUSALS = {"context_length_exceeded": "context", "turns_spent": "max_turns"}
"""Error code of a request that the gateway refused -> the limit that ended the session, as in producers/agents.py."""


class EpisodeUnscored(Exception):
    """The environment ended an episode without a reward. The message holds its errors."""


def result_of(answer: Mapping[str, Any]) -> Verdict | TruncatedRun:
    """Return the reward of an episode: the sum of the trained role's weighted rewards, as upstream's Trace.reward; the
    mean, if that role played several times. If a reward is missing or no number, the value is NaN, which is recorded as
    a failed reward. Raises EpisodeUnscored."""
    traces = [trace for trace in answer["traces"] if trace["trained"]]
    if not answer["ok"] or not traces or answer["unreachable"]:
        raise EpisodeUnscored(_reason(answer))
    components: dict[str, float] = {}
    for trace in traces:
        parts = {name: math.nan if one is None else one[0] * one[1] for name, one in trace["rewards"].items()}
        for name, part in (parts or {NO_REWARD: math.nan}).items():
            components[name] = components.get(name, 0.0) + part / len(traces)
    value = add_rewards(components.values())
    for name, one in traces[0]["metrics"].items():
        if one is not None and math.isfinite(one):
            components[f"metric/{name}"] = float(one)
    shown = ("role", "trained", "stop", "turns", "rewards")
    verdict = Verdict(value, components, {"traces": [{key: trace[key] for key in shown} for trace in answer["traces"]]})
    limits = [trace["stop"] or "length" for trace in traces if trace["limit"]]
    if (refused := REFUSALS.get(answer["refused"])) is not None:
        limits.insert(0, refused)
    return TruncatedRun(limits[0], verdict) if limits else verdict


def _reason(answer: Mapping[str, Any]) -> str:
    errors = [*answer["errors"], *(error for trace in answer["traces"] if not trace["ok"] for error in trace["errors"])]
    said = [f"{error['type']}: {error['message']}" for error in errors] or [f"role {answer['role']} did not act"]
    if answer["unreachable"]:
        said.insert(0, f"the gateway gave no answer: {answer['unreachable']}")
    last = errors[-1]["traceback"] if errors else ""
    return "\n".join(filter(None, ["the environment scored nothing: " + "; ".join(said), last]))


def _refuse_to_judge(_: Episode) -> Verdict:
    raise EpisodeUnscored(
        "the session was cut off before the environment scored it: give its roles limits of their own, below [feeder] "
        "deadline_s and max_context_tokens; the environment scores what they end"
    )


class VerifiersEnvironment(Recipe):
    """Tasks and episodes of one environment package. The options are described in docs/environments/verifiers.md."""

    verifier = FunctionVerifier("verifiers", "1", _refuse_to_judge)

    def __init__(
        self,
        env: str,
        python: str,
        args: str = "{}",
        split: str = "",
        harness: str = "",
        role: str = "",
        variables: str = "",
    ) -> None:
        """Nothing is started yet. Raises BadSource."""
        try:
            read = json.loads(args)
        except ValueError as error:
            raise BadSource(f"args={args}: no JSON ({error}); write args='{{\"taskset\": {{...}}}}'") from None
        if not isinstance(read, dict):
            raise BadSource(f"args={args}: a JSON {type(read).__name__}, not an object")
        if not env or not python:
            raise BadSource("env and python must not be empty: env=my-environment python=/path/to/venv/bin/python")
        self.name = "verifiers-" + env.rpartition("/")[2].partition("@")[0]
        self.role = role
        self.options = EnvironmentOptions(
            env=env,
            python=python,
            args=read,
            split=split,
            harness=harness,
            variables=tuple(filter(None, variables.split(","))),
        )
        self.processes = EnvironmentProcesses(self.options)
        self.agent = FunctionAgent("verifiers", "1", self.play)

    def task(self, row: TaskRow) -> Task:
        """Return the task of a row; its environment has the versions of the packages that wrote the row."""
        environment = Environment(name=f"verifiers:{self.options.env}", version=str(row.get("version", "")))
        return dataclasses.replace(super().task(row), environment=environment)

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield the taskset's tasks; a finite taskset ends. Raises EnvironmentProcessError."""
        return task_rows(self.options, seed)

    async def play(self, session: AgentSession) -> Verdict | TruncatedRun:
        """Play an episode in the environment's process. Raises EnvironmentProcessError, EpisodeUnscored, which are
        failures of the environment: the session is tried again."""
        process = await self.processes.current()
        answer = await process.play(
            {
                "row": dict(session.task),
                "base_url": session.base_url,
                "api_key": session.api_key,
                "model": session.model,
                "role": self.role,
                "max_turns": session.max_turns,
            }
        )
        return result_of(answer)
