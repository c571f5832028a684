"""Environments of the older interface: a package whose `load_environment(...)` returns an Environment.

Source: verifiers 0.3.1, `verifiers.legacy`: utils.env_utils.load_environment, envs.environment.Environment.run_rollout,
types.RolloutOutput. Later versions no longer have it.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import logging
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from verifiers_guest.relay import SESSION_HEADER, TEXT, ModelRelay, RunningEpisode, Seat
from verifiers_guest.tasksets import ENTRIES, NAME, EnvironmentRefused, version_of

ROLE = "agent"
SWALLOWED = ("Error calling reward function", "Error calling group reward function")
"""Beginnings of the log lines after which a rubric counts a reward function that raised as 0."""
_swallowed: ContextVar[list[str]] = ContextVar("_swallowed")
"""Lines that the current episode has written."""


class SwallowedErrors(logging.Handler):
    """Collects exceptions of reward functions, which would otherwise be rewards of 0."""

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line to those of the current episode."""
        line = record.getMessage()
        if line.startswith(SWALLOWED):
            _swallowed.get([]).append(line)


def module_of(env: str) -> str:
    """Return the module of an environment's id."""
    return env.rpartition("/")[2].rpartition("+")[2].partition("@")[0].replace("-", "_")


def is_classic(env: str) -> bool:
    """Return whether the package has the older interface. Raises EnvironmentRefused if the installed verifiers has not,
    and whatever the import raises."""
    name = module_of(env)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:  # a taskset of verifiers itself, or nothing
            return False
        raise
    if not hasattr(module, "load_environment"):
        return False
    if not hasattr(importlib.import_module("verifiers"), "load_environment"):
        raise EnvironmentRefused(
            f"{env!r} has the interface of verifiers before 0.4 (load_environment): install verifiers==0.3.1 in its "
            "virtual environment"
        )
    return True


class ClassicEnvironment:
    """An environment that the package's `load_environment` returned."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import verifiers

        if asked["split"] not in ("", "train", "eval"):
            raise EnvironmentRefused(
                f"split={asked['split']}: an environment of the older interface has train and eval"
            )
        if asked["harness"]:
            raise EnvironmentRefused("harness: an environment of the older interface has none")
        self.split = asked["split"] or "train"
        self.env = verifiers.load_environment(asked["env"], **asked["args"])
        self.version = version_of(module_of(asked["env"]))
        for name in ("verifiers", "verifiers.legacy"):
            logging.getLogger(name).addHandler(SwallowedErrors(logging.ERROR))
        self.relay = ModelRelay()
        self._start = asyncio.Lock()

    def about(self) -> dict[str, Any]:
        """Return what identifies the environment."""
        return {"version": self.version, "roles": [ROLE]}

    def rows(self, seed: int, count: int | None) -> Iterator[dict[str, Any]]:
        """Yield the rows of the dataset, shuffled by the seed."""
        found = self.env.get_dataset(seed=seed) if self.split == "train" else self.env.get_eval_dataset(seed=seed)
        for row in itertools.islice(found, count):
            data = json.loads(json.dumps(dict(row), default=str))
            name = f"{self.split}-{data.get('example_id', '')}"
            yield {"id": name, "prompt": data.get("prompt") or "", "data": data, "version": self.version}

    async def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run an episode, and return its answer. Requests go by the relay, as those of tasksets do."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        if asked["role"] not in ("", ROLE):
            raise EnvironmentRefused(
                f"role={asked['role']}: an environment of the older interface has one role, {ROLE}"
            )
        async with self._start:
            if not self.relay.url:
                await self.relay.start()
        if getattr(self.env, "max_turns", None) == -1 and asked.get("max_turns"):
            self.env.max_turns = asked["max_turns"]
        name, episode = uuid.uuid4().hex, RunningEpisode(asked["base_url"], asked["api_key"], ROLE)
        self.relay.seats[name] = Seat(episode, "main")
        swallowed: list[str] = []
        _swallowed.set(swallowed)
        try:
            async with AsyncOpenAI(
                base_url=self.relay.url,
                api_key="none",
                max_retries=0,
                timeout=None,
                default_headers={SESSION_HEADER: name},
            ) as client:
                chat = OpenAIChatCompletionsClient(client)
                found = await self.env.run_rollout(asked["row"]["data"], chat, asked["model"], {})
        finally:
            del self.relay.seats[name]
        stop, metrics = str(found.get("stop_condition") or ""), (found.get("metrics") or {}).items()
        errors = [_error(found["error"])] if found.get("error") else []
        errors += [
            {"type": "RewardError", "message": line[:TEXT], "traceback": ""} for line in dict.fromkeys(swallowed)
        ]
        trace = {
            "role": ROLE,
            "trained": True,
            "rewards": {"reward": [found["reward"], 1.0]},
            "metrics": {str(key)[:NAME]: value for key, value in itertools.islice(metrics, ENTRIES)},
            "ok": not errors,
            "stop": stop[:NAME],
            "limit": bool(found.get("is_truncated")) or stop == "max_turns_reached",
            "turns": int(dict(metrics).get("num_turns") or 0),
            "errors": errors,
        }
        return {
            "role": ROLE,
            "refused": episode.refused,
            "unreachable": episode.unreachable,
            "ok": not errors,
            "errors": [],
            "traces": [trace],
        }

    async def close(self) -> None:
        """Stop the relay."""
        if self.relay.url:
            await self.relay.stop()


def _error(error: Any) -> dict[str, str]:
    values = error if isinstance(error, dict) else {"error": "error", "message": str(error)}
    return {
        "type": str(values.get("error"))[:NAME],
        "message": str(values.get("message"))[:TEXT],
        "traceback": str(values.get("error_chain_repr", ""))[-TEXT:],
    }
