"""Environments of verifiers.v1: tasksets, the agents that play them, and their rewards.

Source: verifiers 0.4.0, `verifiers.v1`: Env.serving, Env.run_slot, Taskset, Trace, serve.server.EnvServer.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from importlib import metadata
from typing import Any

from verifiers_guest.relay import TEXT, ModelRelay, RunningEpisode, Seat

LIMIT_STOPS = frozenset({"max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed"})
"""Stop conditions of a trace that a limit ended, beside those that end in `_timeout` (`Trace.is_truncated`)."""
ENTRIES, NAME = 100, 200
"""Maximum number of rewards, and of metrics, of one trace, and of characters of a name."""


class EnvironmentRefused(Exception):
    """The environment cannot run as it is configured. The message says what to change."""


class TasksetEnvironment:
    """An environment of verifiers.v1."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import verifiers.v1 as vf

        args = dict(asked["args"])
        self.select = vf.SelectConfig.model_validate(args.pop("select", {}))
        env_id, _, taskset_id = asked["env"].rpartition("+")
        taskset = {**args.pop("taskset", {}), "id": taskset_id}
        raw = {**args, "taskset": taskset, **({"id": env_id} if env_id else {})}
        if asked["split"]:
            fields = vf.taskset_config_type(taskset_id).model_fields
            if "split" not in fields:
                known = ", ".join(sorted(set(fields) - {"task", "id", "system_prompt"})) or "none of its own"
                raise EnvironmentRefused(
                    f"taskset {taskset_id!r} has no splits (its options: {known}); choose tasks by "
                    'args=\'{"select": {"include": {"idx": ["0:100"]}}}\''
                )
            taskset["split"] = asked["split"]
        config = vf.resolve_env_config(raw)
        self.config = self._place_roles(config, args, asked["harness"])
        self.env = vf.load_environment(self.config)
        self.roles = list(self._roles(self.config))
        self.task_class = type(self.env.taskset).task_type()
        self.data_class = self.task_class.data_type()
        if excluded := [name for name, field in self.data_class.model_fields.items() if field.exclude]:
            raise EnvironmentRefused(
                f"{self.data_class.__name__} leaves {excluded} out of its JSON, so its tasks cannot be sent"
            )
        self.version = version_of(type(self.env.taskset).__module__.partition(".")[0])
        self.relay = ModelRelay()
        self._served = contextlib.AsyncExitStack()
        self._start = asyncio.Lock()
        self._started, self._unlimited = False, True

    @staticmethod
    def _roles(config: Any) -> dict[str, Any]:
        from verifiers.v1.configs.agent import agent_config_fields

        return dict(agent_config_fields(config))

    def _place_roles(self, config: Any, args: dict[str, Any], harness: str) -> Any:
        """Give every role a harness and a runtime on this machine, as far as neither its author nor `args` chose one.
        Raises EnvironmentRefused for a harness that would run the model's commands outside any sandbox."""
        import verifiers.v1 as vf

        update = {}
        for name, spec in self._roles(config).items():
            stated = args.get(name) or {}
            chosen = spec.harness or config.agent_harnesses()[name]
            if spec.harness is None and chosen.id == "bash":
                chosen = vf.harness_config_type(harness or "null").model_validate({"id": harness or "null"})
            local = "runtime" not in stated and spec.runtime == vf.PrimeConfig()
            if local and vf.load_harness(chosen).EXECUTES_CODE:
                raise EnvironmentRefused(
                    f"harness {chosen.id!r} of role {name!r} executes what the model writes, and has no sandbox here: "
                    f'name one by args=\'{{"{name}": {{"runtime": {{"type": "docker"}}}}}}\', '
                    'or {"type": "subprocess"} to run it as the user of the runner'
                )
            changes = {"harness": chosen, **({"runtime": vf.SubprocessConfig()} if local else {})}
            update[name] = spec.model_copy(update=changes)
        return config.model_copy(update=update)

    def about(self) -> dict[str, Any]:
        """Return what identifies the environment."""
        return {"version": self.version, "roles": self.roles}

    def rows(self, seed: int, count: int | None) -> Any:
        """Yield the rows of tasks. A finite taskset is shuffled by the seed; an infinite one keeps its order, and
        begins elsewhere for another seed."""
        tasks = self.env.taskset.select(self.select)
        if tasks.bounded:
            tasks = tasks if self.select.shuffle else tasks.shuffle(seed)
        elif seed:
            tasks = tasks.skip((seed % 997) * 1000)
        for task in tasks if count is None else itertools.islice(tasks, count):
            data = task.data.model_dump(mode="json")
            prompt = data["prompt"] or task.data.name or ""
            yield {"id": task.key, "prompt": prompt, "data": data, "version": self.version}

    def task(self, row: dict[str, Any]) -> Any:
        """Build the task from its row, as upstream's environment server does."""
        if not isinstance(row.get("data"), dict):
            raise EnvironmentRefused(
                "the row has no object `data`: leave [feeder] dataset empty, so that the taskset writes it"
            )
        return self.task_class(self.data_class.model_validate(row["data"]), self.config.taskset.task)

    async def open(self) -> None:
        """Start the relay and the servers that all episodes share."""
        async with self._start:
            if not self._started:
                await self.relay.start()
                self._served.push_async_callback(self.relay.stop)
                await self._served.enter_async_context(self.env.serving())
                self._started = True

    async def close(self) -> None:
        """Stop them."""
        await self._served.aclose()

    async def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run an episode, and return its answer."""
        import verifiers.v1 as vf

        await self.open()
        task = self.task(asked["row"])
        episode = RunningEpisode(asked["base_url"], asked["api_key"], self._trained_role(asked["role"]))
        minted: list[str] = []

        def seat(trace: Any) -> None:
            minted.append(trace.id)
            self.relay.seats[trace.id] = Seat(episode, _path(episode, trace))

        client = vf.EvalClientConfig(base_url=self.relay.url, api_key_var="NO_KEY_NEEDED")
        context = vf.ModelContext(model=asked["model"], client=client)
        (slot,) = self.env.slots(task)
        try:
            found = await self._limit_turns(asked.get("max_turns")).run_slot(slot, context, on_trace=seat)
        finally:
            for name in minted:
                self.relay.seats.pop(name, None)
        return {
            "role": episode.role,
            "refused": episode.refused,
            "unreachable": episode.unreachable,
            "ok": self.env.complete(found),
            "errors": [_error(error) for error in found.errors[-3:]],
            "traces": [_trace(trace, episode) for trace in found.traces],
        }

    def _limit_turns(self, max_turns: int | None) -> Any:
        """Return the environment, with the session's limit of turns for the roles that have none of their own."""
        roles = self._roles(self.config)
        limits = {name: spec.max_turns or max_turns for name, spec in roles.items()}
        if limits == {name: spec.max_turns for name, spec in self._roles(self.env.config).items()}:
            return self.env
        env = self.env if self._unlimited else copy.copy(self.env)  # a copy only where sessions have different limits
        self._unlimited = False
        update = {name: spec.model_copy(update={"max_turns": limits[name]}) for name, spec in roles.items()}
        env.config = self.config.model_copy(update=update)
        return env

    def _trained_role(self, asked: str) -> str:
        """Return the role whose traces are the policy's. Raises EnvironmentRefused."""
        if asked and asked not in self.roles:
            raise EnvironmentRefused(f"role={asked}: the environment's roles are {', '.join(self.roles)}")
        if asked or len(self.roles) == 1:
            return asked or self.roles[0]
        own = [name for name, spec in self._roles(self.config).items() if spec.client is None and spec.model is None]
        if len(own) != 1:
            raise EnvironmentRefused(
                f"the environment has the roles {', '.join(self.roles)}: say which one is trained by role=NAME"
            )
        return own[0]


def version_of(module: str) -> str:
    """Return the versions of the packages that play: the taskset's, and verifiers'."""
    packages = {*metadata.packages_distributions().get(module, [])[:1], "verifiers"}
    return " ".join(f"{package}=={metadata.version(package)}" for package in sorted(packages))


def _path(episode: RunningEpisode, trace: Any) -> str:
    """Return the agent path of a trace: the first trace of the trained role is the main lineage, further ones of that
    role are sub-agents, which train as well; all others are side calls, which do not."""
    if trace.agent.name == episode.role and trace.agent.trainable:
        if episode.main is None:
            episode.main = trace.id
            return "main"
        episode.others += 1
        return f"agent/{trace.agent.name}-{episode.others + 1}"
    return f"side/{trace.agent.name}"


def _trace(trace: Any, episode: RunningEpisode) -> dict[str, Any]:
    stop = trace.stop_condition or ""
    rewards = itertools.islice(trace.rewards.items(), ENTRIES)
    return {
        "role": trace.agent.name,
        "trained": trace.agent.name == episode.role and trace.agent.trainable,
        "rewards": {str(name)[:NAME]: None if one is None else [one.score, one.weight] for name, one in rewards},
        "metrics": {str(name)[:NAME]: value for name, value in itertools.islice(trace.metrics.items(), ENTRIES)},
        "entries": len(trace.rewards) + len(trace.metrics),
        "ok": trace.ok,
        "stop": stop[:NAME],
        "limit": trace.is_truncated or trace.is_timeout or stop in LIMIT_STOPS,
        "turns": trace.num_turns,
        "errors": [_error(error) for error in trace.errors[-3:]],
    }


def _error(error: Any) -> dict[str, str]:
    return {"type": error.type, "message": error.message[:TEXT], "traceback": (error.traceback or "")[-TEXT:]}
