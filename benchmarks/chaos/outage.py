"""Take the only engine away for longer than sessions may last: `python benchmarks/chaos/outage.py [--kills 5]`.

Real `turnlog role runner` and `turnlog role gateway` processes and a scripted engine whose answers are all right. Each
time that
sessions are being sampled the engine is killed, and comes back after AWAY_S, which is more than the deadline of every
session and than a turn waits for an engine; every other time the log says that it is gone. From the topics alone: each
rollout has ended (lost), in one final session (twice), completed and with the reward of a run that nobody disturbs
(skipped counts those that have not); what ended otherwise on the way is infra_failure. In the end the engine is made so
slow that its turns themselves take longer than the deadline: those sessions are truncated.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable
from uuid import uuid4

import httpx
from answers import PATIENCE_S, Processes, Story, ask, everything, registered, requested, revive, with_model, work
from servers import say, servers, told

from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.schemas import ids
from turnlog.schemas.events import EngineGone, EngineRegistered, Event, Outcome, RewardAssigned, SessionFinished
from turnlog.schemas.topics import SESSIONS
from turnlog.settings import Settings

DEADLINE_S = 6.0
AWAY_S = 10.0
REQUEST_TIMEOUT_S = 8.0
"""For which a gateway waits for an engine before it answers 503."""
SAMPLING = 4
"""Requests that the engine runs at least when it is killed."""
TOKEN_S = 0.02
SLOW_TOKEN_S = 1.0
"""A turn is some twenty tokens."""


class Engine:
    """The only one."""

    def __init__(self, processes: Processes) -> None:
        self._processes, self.url = processes, processes.settings.engine.urls[0]
        self.reports = 0

    def running(self) -> int:
        """Requests that it samples; -1 where it does not answer."""
        try:
            return len(httpx.get(f"{self.url}/running", timeout=1.0).json())
        except httpx.TransportError:
            return -1

    def pace(self, token_s: float) -> None:
        """The time that a token takes from now on."""
        httpx.post(f"{self.url}/pace", params={"of": token_s}).raise_for_status()

    def kill(self) -> None:
        """SIGKILL."""
        self._processes.children["engine"].kill()

    async def start(self, role: Role) -> None:
        """Start it, or start it again; its loader says so."""
        self._processes.start("engine")
        await until(lambda: self.running() >= 0)
        await asyncio.to_thread(self.pace, TOKEN_S)
        await self.say(role, registered(role.settings))

    async def say(self, role: Role, report: EngineRegistered | EngineGone) -> None:
        """What its loader would write."""
        self.reports += 1
        await role.events.append(dataclasses.replace(report, event_id=f"engine-0 {self.reports}"))


def gone(settings: Settings) -> EngineGone:
    """What its loader writes when it has died."""
    return EngineGone(
        event_id="", run_id=settings.run.id, engine_id="engine-0", url=settings.engine.urls[0], state="gone", version=0,
        cause="killed",
    )  # fmt: skip


async def until(there: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Whether it is so, waiting for that at most so long."""
    deadline = time.monotonic() + patience_s
    while not await asyncio.to_thread(there):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)  # other processes set no event
    return True


async def outages(engine: Engine, processes: Processes, story: Story, role: Role, *, kills: int) -> set[str]:
    """Kill the engine while it samples, and bring it back; the rollouts that an outage did not let go on."""
    waited: set[str] = set()
    for number in range(kills):
        sampling = await until(lambda: engine.running() >= SAMPLING)
        engine.kill()
        story.kills["engine"] += sampling
        if number % 2:
            await engine.say(role, gone(role.settings))
        opened_before = story.requested - story.over
        say(f"kill {number + 1}: {len(opened_before)} rollouts are open, {len(story.over)} over")
        await asyncio.sleep(AWAY_S)  # the outage itself
        waited |= opened_before - story.over
        revive_others(processes, story)
        await engine.start(role)
    return waited


async def too_slow(engine: Engine, story: Story, role: Role) -> str:
    """A rollout whose own turns take longer than its deadline, to its end."""
    await asyncio.to_thread(engine.pace, SLOW_TOKEN_S)
    slow = requested(role.settings, "slow", 0, deadline_s=DEADLINE_S)
    await role.events.append(slow)
    story.requested.add(slow.rollout_id)
    await until(lambda: story.over == story.requested)
    return slow.rollout_id


async def torture(settings: Settings, *, kills: int) -> int:
    """The whole run; the exit status."""
    more = {"TURNLOG_ENGINE_REQUEST_TIMEOUT_S": str(REQUEST_TIMEOUT_S)}
    processes, story = Processes(settings, right=1.0, more=more), Story()
    engine = Engine(processes)
    async with open_role("chaos", settings) as role:
        await configure(role)
        for name in ("gateway", "runner"):
            processes.start(name)
        await engine.start(role)
        working = asyncio.create_task(work(role, story))
        asking = asyncio.create_task(ask(role, story, deadline_s=DEADLINE_S))
        waited = await outages(engine, processes, story, role, kills=kills)
        story.enough = True
        await asking
        await until(lambda: story.over == story.requested)
        slow = await too_slow(engine, story, role)
        story.exits = {name: child.stop() for name, child in reversed(processes.children.items())}
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        records = [event for _, _, event in await everything(role, SESSIONS.name)]
    return verdict(story, records, slow=slow, waited=waited, kills=kills)


def revive_others(processes: Processes, story: Story) -> None:
    """Start again what ended unasked, as a supervisor does; the engine is away by intention."""
    engine = processes.children.pop("engine")
    revive(processes, story)
    processes.children["engine"] = engine


def verdict(story: Story, records: list[Event], *, slow: str, waited: set[str], kills: int) -> int:
    """Compare, print the line. `slow`: the rollout that is too slow itself."""
    finishes = [event for event in records if isinstance(event, SessionFinished)]
    rewards = {event.session_id: event.value for event in records if isinstance(event, RewardAssigned)}
    fast = story.requested - {slow}
    rollouts = {ids.session_id(one, attempt): one for one in story.requested for attempt in range(9)}
    ends = [(rollouts[one.session_id], one) for one in finishes]
    final = Counter(rollout for rollout, one in ends if one.final)
    done = {rollout for rollout, one in ends
            if one.final and one.outcome is Outcome.completed and rewards.get(one.session_id) == 1.0}  # fmt: skip
    outcomes = Counter(
        f"{one.outcome.value}:{one.reason.partition(':')[0]}" for rollout, one in ends if rollout != slow
    )
    others = [one for rollout, one in ends if rollout != slow and not one.final]
    judged_as_the_agents = sum(one.outcome is not Outcome.infra_failure for one in others)
    of_slow = {one.outcome.value for rollout, one in ends if rollout == slow}
    lost, twice, skipped = len(fast - final.keys()), sum(count - 1 for count in final.values()), len(fast - done)
    ok = not (lost or twice or skipped or judged_as_the_agents) and of_slow == {Outcome.truncated.value}
    ok = ok and story.kills.total() == kills and bool(waited)
    ok = ok and all(status == 0 for name, status in story.exits.items() if name != "engine")
    return told(
        id="outage", kills=story.kills.total(), lost=lost, twice=twice, skipped=skipped,
        identical=not judged_as_the_agents, ok=ok,
        detail={
            "rollouts": len(fast), "waited_longer_than_their_deadline": len(waited), "ends": outcomes,
            "too_slow_themselves": sorted(of_slow), "deaths": story.deaths, "exits": story.exits,
            "deadline_s": DEADLINE_S, "away_s": AWAY_S,
        },
    )  # fmt: skip


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Take the only engine away for longer than sessions may last.")
    parser.add_argument("--kills", type=int, default=5)
    arguments = parser.parse_args()
    with servers(f"chaos-{uuid4().hex[:8]}") as settings:
        return asyncio.run(torture(with_model(settings), kills=arguments.kills))


if __name__ == "__main__":
    sys.exit(main())
