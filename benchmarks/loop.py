"""LOOP: seconds of the demo's loop, from the first session to the last acknowledged weights.

The floor is the bare loop of the same model, task and steps in the same run: one process that samples from an engine of
its own, answers the tool calls itself, steps the same learner and loads the weights into the engine from a folder.
There is no log, no gateway, no sandbox, no fold and no fault that it would survive. One after the other, never both.

    python benchmarks/loop.py [SETTINGS]        # SETTINGS: not the demo but this run, which is up and trained
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray
from row import told
from tokenizers import Tokenizer

from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.embedded.up import status_processes
from turnlog.infra.engines.protocol import Generate
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.infra.history import events
from turnlog.infra.roles.role import open_role
from turnlog.infra.run_folder import resolve_endpoints
from turnlog.plugins.recipes.calc import OPERATORS, task_row
from turnlog.plugins.recipes.warm_start import END
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.schemas.topics import ENGINES, SESSIONS
from turnlog.settings import Settings, load
from turnlog.trainer.calls import Ranks
from turnlog.trainer.launch import ranks
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearningPlan, learning_plan
from turnlog.trainer.weight_records import description

GOAL_SHARE = 0.5
CALL = re.compile(r'<tool_call>\{"name":"calc","arguments":\{"expr":"(\d+)([-+*])(\d+)"\}\}</tool_call>')
TIMEOUT_S = 1500.0
ENDS_WITHIN_S = 30.0


@dataclass(slots=True)
class Episode:
    """One rollout: ids of all its turns, which of them the engine sampled, and their log-probs."""

    task: Mapping[str, str]
    token_ids: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0

    def take(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Add a piece: sampled where there are log-probs."""
        self.token_ids += ids
        self.trained += [int(logprobs is not None)] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


class Bare:
    """The loop without turnlog around it."""

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        self._engine, self._control = SGLang(url), SGLangControl(url)
        self._tokenizer = Tokenizer.from_file(str(Path(settings.model.path) / "tokenizer.json"))
        self._places = asyncio.Semaphore(settings.runner.concurrency)
        self._random = random.Random(settings.feeder.seed)

    async def run(self, learner: Ranks, plan: LearningPlan, folder: Path) -> float:
        """Seconds of all steps, weights before the first and after the last included."""
        try:
            began = time.monotonic()
            await self._load(learner, plan, folder / "0", 0)
            for step in range(self._settings.feeder.draws):
                tasks = [task_row(self._random) for _ in range(self._settings.batcher.prompts_per_draw)]
                groups = await asyncio.gather(*(self._group(task) for task in tasks))
                learner.call(Learner.step, batch(groups), plan.objective, plan.learning_rate(step))
                await self._load(learner, plan, folder / str(step + 1), step + 1)
            return time.monotonic() - began
        finally:
            await self._engine.close()
            await self._control.close()

    async def _load(self, learner: Ranks, plan: LearningPlan, folder: Path, version: int) -> None:
        await asyncio.to_thread(export, learner, plan, folder)
        await self._control.load(folder, version, timeout_s=240.0)

    async def _group(self, task: Mapping[str, str]) -> list[Episode]:
        rollouts = range(self._settings.feeder.group_size)
        return list(await asyncio.gather(*(self._episode(task) for _ in rollouts)))

    async def _episode(self, task: Mapping[str, str]) -> Episode:
        episode = Episode(task)
        async with self._places:
            episode.take(self._encoded(f"<|im_start|>user\n{task['prompt']}{END}\n<|im_start|>assistant\n"))
            said = await self._turn(episode)
            if call := CALL.fullmatch(said.removesuffix(END)):
                answer = str(OPERATORS[call[2]](int(call[1]), int(call[3])))
                mark = "" if said.endswith(END) else END
                episode.take(self._encoded(f"{mark}\n<|im_start|>tool\n{answer}{END}\n<|im_start|>assistant\n"))
                episode.reward = float(await self._turn(episode) == task["answer"] + END)
        return episode

    async def _turn(self, episode: Episode) -> str:
        feeder = self._settings.feeder
        request = Generate(
            rid=uuid.uuid4().hex, input_ids=list(episode.token_ids), temperature=feeder.temperature,
            max_new_tokens=feeder.max_new_tokens, stop_token_ids=(self._tokenizer.token_to_id(END),),
        )  # fmt: skip
        ids: list[int] = []
        async for piece in self._engine.generate(request, stream=False, timeout_s=60.0):
            episode.take(piece.ids, piece.logprobs)
            ids += piece.ids
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def export(learner: Ranks, plan: LearningPlan, folder: Path) -> None:
    """A folder that the engine loads."""
    folder.mkdir(parents=True)
    for name, content in description(plan.model).items():
        (folder / name).write_bytes(content)
    learner.call(Learner.export_files, folder)


def batch(groups: Sequence[Sequence[Episode]]) -> BatchRows:
    """Rows of groups of one size: advantages of GRPO, each prompt's tokens of equal weight."""
    episodes, prompts, rollouts = list(chain(*groups)), len(groups), len(groups[0])
    rewards = np.array([episode.reward for episode in episodes], "<f4").reshape(prompts, rollouts)
    spread = rewards.std(1, keepdims=True) + 1e-6
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / spread).reshape(-1)
    lengths = np.array([len(episode.token_ids) for episode in episodes], "<i4")
    trained = joined([episode.trained for episode in episodes], "|u1")
    sampled = np.array([sum(episode.trained) for episode in episodes]).reshape(prompts, rollouts).sum(1)
    rows = len(episodes)
    return BatchRows(
        sample_ids=tuple(str(row) for row in range(rows)),
        group_ids=tuple(str(row // rollouts) for row in range(rows)),
        session_ids=tuple(str(row) for row in range(rows)),
        rollout_index=(np.arange(rows) % rollouts).astype("<i4"),
        segment_index=np.zeros(rows, "<i4"),
        lengths=lengths,
        token_ids=joined([episode.token_ids for episode in episodes], "<i4"),
        trained=trained,
        logprobs=joined([episode.logprobs for episode in episodes], "<f4"),
        advantages=(np.repeat(advantages, lengths) * trained).astype("<f4"),
        weight_divisor=np.repeat(sampled * prompts, rollouts).astype("<i8"),
        temperature=np.ones(rows, "<f4"),
        rewards=rewards.reshape(-1),
        version_min=np.zeros(rows, "<i4"),
        version_max=np.zeros(rows, "<i4"),
    )


def joined(columns: Sequence[Sequence[float]], dtype: str) -> NDArray[np.generic]:
    """[T] one after the other."""
    return np.concatenate([np.asarray(column, dtype) for column in columns])


def bare_seconds(settings: Settings, url: str, folder: Path) -> float:
    """Seconds of the bare loop, its learner's start not counted."""
    plan = learning_plan(settings)
    with ranks(plan) as learner:
        return asyncio.run(Bare(settings, url).run(learner, plan, folder))


def alone(settings: Settings) -> str:
    """The URL of the run's engine, its loader ended: that would put the run's weights back amid the bare loop's."""
    loaders = [child["pid"] for child in status_processes(settings) if child["name"].startswith("loader-")]
    for loader in map(psutil.Process, loaders):
        loader.terminate()
        loader.wait(ENDS_WITHIN_S)
    return settings.engine.urls[0]


async def log_seconds(settings: Settings) -> float:
    """Seconds from the first session to the last acknowledgement of a run, by the broker's clock."""
    async with open_role("bench", settings) as role:
        started = [record.timestamp_ms async for record, _ in events(role, SESSIONS)]
        loaded = [record.timestamp_ms async for record, _ in events(role, ENGINES)]
    return (max(loaded) - min(started)) / 1000


def compared(directory: Path) -> tuple[Settings, float, float]:
    """The demo in a folder, then the bare loop on an engine of its own. Raises CalledProcessError."""
    environment = os.environ | {"TURNLOG_RUN_ID": "loop", "TURNLOG_RUN_DIRECTORY": str(directory / "run")}
    demo = [sys.executable, "-m", "turnlog.cli", "demo"]
    subprocess.run(demo, env=environment, stdout=sys.stderr, check=True, timeout=TIMEOUT_S)
    value = float(json.loads((directory / "run/report.json").read_text())["seconds"]["loop"])
    settings = load(directory / "run/settings.toml", {})
    engine = EngineServer(Path(settings.model.path), settings.engine, log=directory / "engine.log")
    try:
        return settings, value, bare_seconds(settings, engine.start(), directory / "weights")
    finally:
        engine.stop()


def main() -> int:
    """Print one JSON line."""
    with tempfile.TemporaryDirectory(prefix="turnlog-loop-") as folder:
        if sys.argv[1:]:
            settings = resolve_endpoints(load(Path(sys.argv[1]), {}))
            value = asyncio.run(log_seconds(settings))
            floor = bare_seconds(settings, alone(settings), Path(folder))
        else:
            settings, value, floor = compared(Path(folder))
    sessions = settings.feeder.draws * settings.batcher.prompts_per_draw * settings.feeder.group_size
    return told(
        id="LOOP", value=value, unit="s", goal=None, met=True, floor=floor, goal_share=GOAL_SHARE,
        detail={"steps": settings.feeder.draws, "sessions": sessions, "floor_is": "the bare loop"},
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
