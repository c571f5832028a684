"""The live terminal display of a run, folded from its topics and drawn with rich: phase, steps, reward curve, tokens/s,
lag, engines, tools.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turnlog.infra.roles.terminal import Terminal
from turnlog.schemas import topics
from turnlog.schemas.events import (
    EngineGone,
    EngineRegistered,
    EngineWeightsLoaded,
    Event,
    SampleBatchFormed,
    SessionFinished,
    SessionStarted,
    StepCompleted,
    ToolCallCompleted,
    TurnCompleted,
    WeightVersionPublished,
)
from turnlog.settings import Settings

WATCHED = (topics.SESSIONS, topics.TURNS, topics.TOOL_RESULTS, topics.BATCHES, topics.STEPS, topics.WEIGHTS,
           topics.ENGINES)  # fmt: skip


@dataclass(slots=True)
class Picture:
    """Counts so far. A repeated record counts once where that matters (steps, calls)."""

    steps: dict[int, StepCompleted] = field(default_factory=dict)
    sessions_started: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    output_tokens: int = 0
    tool_calls: dict[str, str] = field(default_factory=dict)
    batches: int = 0
    lag: int = 0
    version: int = -1
    version_batch: int = -2
    """Last batch behind the newest version."""
    engines: dict[str, int] = field(default_factory=dict)
    """Engine -> version served; -2 when it is gone."""

    def apply(self, event: Event) -> None:
        """Fold one event."""
        match event:
            case SessionStarted():
                self.sessions_started += 1
            case SessionFinished():
                self.outcomes[event.outcome.value] += 1
            case TurnCompleted():
                self.turns += 1
                self.output_tokens += event.output_tokens
            case ToolCallCompleted():
                self.tool_calls.setdefault(event.call_id, event.status.value)
            case SampleBatchFormed():
                self.batches, self.lag = event.batch_index + 1, event.max_lag
            case StepCompleted():
                self.steps[event.batch_index] = event
            case WeightVersionPublished():
                if event.version > self.version:
                    self.version, self.version_batch = event.version, event.batch_index
            case EngineRegistered() | EngineWeightsLoaded():
                self.engines[event.engine_id] = event.version
            case EngineGone():
                self.engines[event.engine_id] = -2
            case _:
                pass  # other records of these topics are not shown

    def published_after(self, batch: int) -> bool:
        """Whether the newest weights have seen `batch`."""
        return self.version_batch >= batch

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each trained batch, in order."""
        return [self.steps[index].reward_mean for index in sorted(self.steps)]


BARS = " ▁▂▃▄▅▆▇█"
REFRESH_PER_S = 4


def curve(values: list[float], width: int = 60) -> str:
    """Values in [0, 1] as one line of bars, the newest `width` of them."""
    return "".join(BARS[round(min(max(value, 0.0), 1.0) * (len(BARS) - 1))] for value in values[-width:])


class Display:
    """What is shown. `phase` may be set from outside; on a terminal that is none, one line per step is printed."""

    def __init__(self, settings: Settings, console: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self.phase = "starting"
        self.picture = Picture()
        self._run_id = settings.run.id
        self._wanted = settings.feeder.draws * settings.batcher.updates_per_draw
        self._console = console
        self._clock = clock
        self._loop_began: float | None = None
        self._said = 0

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[Display]:
        """Draw until the block ends."""
        if not self._console.is_terminal:
            yield self
            self.refreshed()
            return
        with Live(get_renderable=self.render, console=self._console, refresh_per_second=REFRESH_PER_S):
            yield self

    def refreshed(self) -> None:
        """The picture changed. Where nothing can be redrawn, print each new step once."""
        if self._loop_began is None and self.picture.sessions_started:
            self._loop_began = self._clock()
        if self._console.is_terminal:
            return
        for index in sorted(self.picture.steps)[self._said :]:
            step = self.picture.steps[index]
            self._said += 1
            self._console.print(
                f"step {self._said:3d}/{self._wanted}  reward {step.reward_mean:.3f}  loss {step.loss:+.4f}  "
                f"gap {step.logprob_gap_max:.0e}  lag {step.lag_max}  version {self.picture.version}  "
                f"{self._tokens_per_s():.0f} tok/s"
            )

    def render(self) -> RenderableType:
        """The whole panel."""
        picture = self.picture
        done = len(picture.steps)
        rewards = picture.rewards
        facts = Table.grid(padding=(0, 2))
        facts.add_row("phase", Text(self.phase, style="bold"))
        facts.add_row("steps", Group(Text(f"{done}/{self._wanted}  {self._left()}"),
                                     ProgressBar(total=self._wanted, completed=done, width=40)))  # fmt: skip
        facts.add_row("reward", Text(f"{curve(rewards)} {rewards[-1]:.3f}" if rewards else "-", style="green"))
        facts.add_row("sessions", f"{picture.sessions_started} started, {_counts(picture.outcomes)}")
        facts.add_row("turns", f"{picture.turns}  ({picture.output_tokens:,} tokens, {self._tokens_per_s():.0f} tok/s)")
        facts.add_row("tool calls", _counts(Counter(picture.tool_calls.values())))
        facts.add_row("weights", f"version {picture.version}, lag {picture.lag}")
        engines = ", ".join(f"{name}: {_serving(version)}" for name, version in sorted(picture.engines.items()))
        facts.add_row("engines", engines or "-")
        return Panel(facts, title=Text(f"turnlog · run {self._run_id}"))

    def loop_seconds(self) -> float:
        """Seconds since the first session started."""
        return 0.0 if self._loop_began is None else self._clock() - self._loop_began

    def _tokens_per_s(self) -> float:
        if self._loop_began is None:
            return 0.0
        return self.picture.output_tokens / max(self._clock() - self._loop_began, 1e-9)

    def _left(self) -> str:
        done = len(self.picture.steps)
        if self._loop_began is None or not done:
            return ""
        seconds = (self._clock() - self._loop_began) / done * (self._wanted - done)
        return f"about {seconds:.0f} s left"


def _serving(version: int) -> str:
    return {-2: "gone", -1: "no weights yet"}.get(version, f"version {version}")


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "-"
