"""Source `reasoning-gym tasks=chain_sum,leg_counting`: generated tasks of reasoning-gym, scored by reasoning-gym.

A row holds the entry that reasoning-gym made, so that an answer can be scored wherever and whenever the session is
judged. The reward is `score_answer` of the task: 1 for a right answer, up to 1 for others.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from turnlog.environments import (
    BadSource,
    Episode,
    FunctionVerifier,
    Message,
    Recipe,
    SandboxCall,
    TaskRow,
    Verdict,
    WarmStart,
    tool_declarations,
)
from turnlog.infra.environments.simulations import NO_OBJECT, object_of
from turnlog.infra.environments.sources import weights_option, whole_option
from turnlog.plugins.reasoning_gym import chain_sum
from turnlog.plugins.reasoning_gym.answers import AnswerFormat, is_safe
from turnlog.plugins.reasoning_gym.calculator import CALCULATOR, calculate
from turnlog.plugins.reasoning_gym.process import ReasoningGymError, reasoning_gym
from turnlog.schemas.events.sessions import Environment
from turnlog.schemas.events.tools import SandboxSpec

VERSION: Final = "0.1.25"
"""Version of reasoning-gym whose tasks these are."""
SIZE: Final = 500
"""Entries of a dataset of reasoning-gym, after which the source goes on with the next seed."""
MOST: Final = (1 << 31) - 1
"""Largest seed and size."""
TOOLS: Final = ("", "calculator", "python")


@dataclass(frozen=True)
class ReasoningGymOptions:
    """Options of the source, parsed."""

    tasks: Mapping[str, float]
    """Task -> weight."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Task -> fields of its configuration."""
    seed: int | None = None
    """Seed of the entries, in place of the run's."""
    size: int = SIZE
    format: AnswerFormat = AnswerFormat.tags
    tool: str = ""
    """Name of the tool that the agent gets, of TOOLS; empty for none."""
    python: str = ""
    """Interpreter that has reasoning-gym; the one that runs turnlog if empty."""


class ReasoningGym(Recipe):
    """Tasks of reasoning-gym."""

    name = "reasoning-gym"
    environment = Environment(name=name, version=VERSION)
    sandbox_tools: tuple[str, ...] = ()

    @property
    def demo_rise(self) -> float:
        """Rise of the mean reward that the demo of a tiny policy requires."""
        return 0.0 if self.warm_start is None else 0.15

    def __init__(self, options: ReasoningGymOptions) -> None:
        """Make a source. Nothing is started before the first row or score is needed."""
        self._options = options
        self.verifier = FunctionVerifier("reasoning-gym", "1", self._judge)
        if options.tool == "python":
            self.sandbox, self.sandbox_tools = SandboxSpec(), ("python",)

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """The tool that the option `tool` names."""
        if self._options.tool == "python":
            return tool_declarations(["python"])
        return (CALCULATOR,) if self._options.tool else ()

    @property
    def warm_start(self) -> WarmStart | None:  # type: ignore[override]  # a function of the options here
        """Tiny policy to begin with, if the only task is a chain_sum that one can learn; else None."""
        options = self._options
        if set(options.tasks) != {"chain_sum"} or options.tool == "python" or options.format is not AnswerFormat.line:
            return None
        config = options.configs.get("chain_sum", {})
        return chain_sum.warm_start(config, self._prompt, options.python, tool=bool(options.tool))

    def tool_call(self, name: str, arguments: str) -> SandboxCall | str:
        """Return the calculator's answer at once; it needs no sandbox."""
        if self._options.tool != "calculator":
            return super().tool_call(name, arguments)
        values = object_of(arguments)
        if name != "calculator":
            return f"there is no tool {name!r}"
        return NO_OBJECT if values is None else calculate(values.get("expression"))

    def solution(self, row: TaskRow) -> list[Message] | None:
        """Return a message with the entry's own answer; None if the entry has none."""
        answer = row["entry"]["answer"]
        return (
            None if answer is None else [{"role": "assistant", "content": self._options.format.format_answer(answer)}]
        )

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield entries without end: of each task those of one seed, then those of the next."""
        options = self._options
        draw = random.Random(f"reasoning-gym {seed} {options.seed}")
        # Entry i of seed s is entry i - 1 of seed s + 1 for many tasks: seeds of runs must lie far apart.
        first = draw.getrandbits(31) if options.seed is None else options.seed
        counts = {task: itertools.count() for task in options.tasks}
        while True:
            task = draw.choices([*options.tasks], [*options.tasks.values()])[0]
            block, index = divmod(next(counts[task]), options.size)
            config = {**options.configs.get(task, {}), "seed": first + block * options.size, "size": options.size}
            entry = reasoning_gym(options.python).entry(task, config, index)
            yield {
                "id": f"{task}-{config['seed']}-{index}",
                "prompt": self._prompt(entry["question"]),
                "task": task,
                "config": config,
                "entry": entry,
            }

    def _prompt(self, question: str) -> str:
        return f"{question}\n{self._options.format.rule}"

    def _judge(self, episode: Episode) -> Verdict:
        """Return reasoning-gym's score of the answer in the last message; 0 if it has none."""
        row, last = episode.task, episode.messages[-1] if episode.messages else {"role": ""}
        said = str(last.get("content") or "") if last["role"] == "assistant" and not last.get("tool_calls") else ""
        answer = self._options.format.answer_in(said)
        calls = float(sum(message["role"] == "tool" for message in episode.messages))
        evidence = {"task": row["task"], "answer": (answer or "")[:1000], "expected": row["entry"]["answer"]}
        if answer is None:
            return Verdict(0.0, {"answered": 0.0, "calls": calls}, {**evidence, "said": said[-400:]})
        safe = answer == row["entry"]["answer"] or is_safe(row["task"], answer)
        gym = reasoning_gym(self._options.python)
        score = gym.score(row["task"], row["config"], row["entry"], answer if safe else "")
        fault = score.fault if safe else "evaluating it might run code, so it counts as an empty answer"
        components = {"answered": 1.0, "calls": calls, "unscorable": float(bool(fault))}
        return Verdict(score.value, components, {**evidence, **({"fault": fault} if fault else {})})


def reasoning_gym_source(
    tasks: str,
    seed: str = "",
    size: str = "",
    format: str = "tags",
    tool: str = "",
    python: str = "",
    **config: str,
) -> ReasoningGym:
    """Make the source of `reasoning-gym tasks=NAME[:WEIGHT],... [OPTION=VALUE] [FIELD=VALUE]`. Raises BadSource."""
    try:
        known = reasoning_gym(python).tasks()
    except (ReasoningGymError, OSError) as error:
        raise BadSource(
            f"{error}; the extra turnlog[reasoning-gym] has it, and python=PATH names another one"
        ) from error
    weights = _weights(tasks, known)
    if format not in AnswerFormat.__members__:
        raise BadSource(f"format={format!r} must be one of {', '.join(AnswerFormat.__members__)}")
    if tool not in TOOLS:
        raise BadSource(f"tool={tool!r} must be calculator or python; leave it out for none")
    options = ReasoningGymOptions(
        tasks=weights,
        configs=_configs(config, weights, known),
        seed=whole_option("seed", seed, 1, MOST) if seed else None,
        size=whole_option("size", size, 1, MOST) if size else SIZE,
        format=AnswerFormat[format],
        tool=tool,
        python=python,
    )
    for task in weights:
        _try_entry(task, options)
    return ReasoningGym(options)


def _weights(tasks: str, known: Mapping[str, list[str]]) -> dict[str, float]:
    if tasks == "all":
        return dict.fromkeys(sorted(known), 1.0)
    weights = weights_option("tasks", tasks)
    for name in weights:
        if name == "zebra_puzzles" and name not in known:
            raise BadSource("zebra_puzzles needs pycosat, which has no wheel: pip install pycosat, with a C compiler")
        if name not in known:
            raise BadSource(f"tasks={tasks!r}: reasoning-gym has no task {name!r}; it has {', '.join(sorted(known))}")
    return weights


def _configs(
    given: Mapping[str, str], weights: Mapping[str, float], known: Mapping[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """Return the configuration of each task. FIELD is for all tasks that have it, TASK__FIELD for one."""
    configs: dict[str, dict[str, Any]] = {task: {} for task in weights}
    for option, text in given.items():
        one, _, name = option.rpartition("__")
        where = [task for task in weights if name in known[task] and one in ("", task)]
        if not where or name in ("seed", "size"):
            legal = "; ".join(f"{task}: {', '.join(known[task])}" for task in list(weights)[:5])
            raise BadSource(f"{option}={text}: no task of {', '.join(weights)} has such a field ({legal})")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        for task in where:
            configs[task][name] = value
    return configs


def _try_entry(task: str, options: ReasoningGymOptions) -> None:
    """Refuse a configuration that reasoning-gym refuses, before the run begins. Raises BadSource."""
    if not options.configs[task]:
        return
    try:
        reasoning_gym(options.python).entry(task, {**options.configs[task], "seed": 1, "size": 1}, 0)
    except ReasoningGymError as error:
        raise BadSource(f"{task} refuses the configuration {options.configs[task]}: {error}") from error
