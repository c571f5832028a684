"""A taskset for tests: two turns, a tool, a judge, and rows that misbehave on request."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator

import verifiers.v1 as vf

from lab_counting.tools import CountingTools

__all__ = ["CountingEnv", "CountingTaskset"]
TASKS = 3


class CountingTaskConfig(vf.TaskConfig):
    judge: vf.JudgeConfig = vf.JudgeConfig(base_url="http://127.0.0.1:9/v1", api_key_var="LAB_JUDGE", model="the-judge")
    judged: bool = False


class CountingData(vf.TaskData):
    number: int
    answer: str
    how: str = ""
    """What goes wrong, if anything."""


class PolitenessJudge(vf.Judge[float]):
    prompt = "Is this polite? {response}"

    def parse(self, response: vf.JudgeResponse[float]) -> float:
        return float(response.text)


class CountingTask(vf.Task[CountingData, vf.State, CountingTaskConfig]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        print("a print of the environment:", self.data.number)
        print('{"op": "ended", "id": 0}', flush=True)
        if self.data.how == "raise in setup":
            raise KeyError("a bug of the environment")
        if self.data.how == "leave":
            sys.exit(3)
        if self.data.how == "block":
            time.sleep(600)  # noqa: ASYNC251 - a bug of the environment
        if self.data.how == "hang":
            await asyncio.sleep(600)
        if self.data.how == "die":
            os.kill(os.getpid(), 9)
        if self.data.how == "print 100 MB":
            print("x" * 100_000_000)

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.how == "nan":
            return float("nan")
        if self.data.how == "infinite":
            return float("inf")
        if self.data.how == "raise in reward":
            raise ValueError("a bug of the reward")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def polite(self, trace: vf.Trace) -> float:
        if not self.config.judged:
            return 0.0
        result = await PolitenessJudge(self.config.judge).evaluate(trace=trace, response=trace.last_reply)
        return float(result.parsed)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))

    @vf.metric
    async def odd(self, trace: vf.Trace) -> dict[str, float]:
        if self.data.how == "long answer":
            return {f"{number} {'x' * 100_000}": 1.0 for number in range(1000)}
        return {"number": float(self.data.number), "nothing": float("nan")}


class CountingConfig(vf.TasksetConfig):
    task: CountingTaskConfig = CountingTaskConfig()
    tools: vf.ToolsetConfig = vf.ToolsetConfig()
    how: str = ""
    split: str = "train"
    tooled: bool = True


class CountingEnv(vf.SingleAgentEnv):
    """After the first answer, the user asks for it again in words."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated:
                await interaction.turn("And in words?")


class CountingTaskset(vf.Taskset[CountingTask, CountingConfig]):
    @classmethod
    def toolsets(cls, config: CountingConfig) -> list[vf.Toolset]:
        return [CountingTools(config.tools)] if config.tooled else []

    def load(self) -> Iterator[CountingTask]:
        first = 0 if self.config.split == "train" else 100
        for number in range(first, first + TASKS):
            data = CountingData(
                number=number,
                prompt=f"Count to {number} with the tool.",
                system_prompt="Answer with one word.",
                answer=f"words {number}",
                how=self.config.how,
            )
            yield CountingTask(data, self.config.task)
