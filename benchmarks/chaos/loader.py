"""Kill the loader as it fetches and as it swaps: `python benchmarks/chaos/loader.py [--kills 20] [--engine real]`.

Weights are published one version after another, most as what changed, some of another shape, while clients ask an
engine that has nothing but what loaders give it. A real `turnlog role loader` is killed by SIGKILL, --kills times in a
fetch and as often in a swap, in turns at a seeded instant of what it does there (dying_loader.py).

In the end the engine must have the newest version, and the log name every version as loaded, refused or superseded
(lost), once (twice), in order (skipped). What was answered must be of weights that an event names (identical): its
tokens are labelled with published versions, and have the log-probs that the same engine gives once it has been handed
that version anew, from the store. Those of the scripted engine follow from the bits of its weights at each token; of a
real one's answer over two versions only the part before the swap is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import itertools
import math
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import torch
from answers import everything, with_model
from dying import ended, until
from dying_loader import FETCH, SWAP
from safetensors.torch import save_file
from servers import TURNLOG, environment, say, servers, told
from takeover import up

from tests.fakes.weights import Publications, version
from tests.tiny_model import make_tiny_model
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.engines.protocol import Generate, OutputChunk
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.tensors.versions import assemble_version, chain_of
from turnlog.schemas.events import EngineWeightsLoaded, EngineWeightsRefused, Event, WeightVersionPublished
from turnlog.schemas.topics import ENGINES, WEIGHTS
from turnlog.settings import EngineSettings, Settings
from turnlog.trainer.weights import read_weights

CHAIN = 4
"""Differences in a row."""
BAD_EVERY = 5
AHEAD = 3
"""Versions that a loader is behind, at most: some are superseded while there is none."""
CLIENTS = 3
PAUSE_S = 0.02
TOKENS = 8
PROMPT = (5, 6, 7, 8, 9)
SAME = 1e-4
"""Log-probs of one model differ by less, whatever else the engine computes beside them."""
PATIENCE_S = 180.0


@dataclass(slots=True)
class Story:
    """What happened."""

    struck: Counter[str] = field(default_factory=Counter)
    answers: list[OutputChunk] = field(default_factory=list)
    exit_status: int | None = None
    faults: list[str] = field(default_factory=list)
    """Whatever else was not to be."""


def loader(settings: Settings, *doom: str) -> Child:
    """Start `turnlog role loader`, or one that dies of itself."""
    variables = {
        "TURNLOG_MODEL_PATH": settings.model.path,
        "TURNLOG_ENGINE_URLS": settings.engine.urls[0],
        "TURNLOG_LOADER_TIMEOUT_S": "20",
    }
    log = Path(settings.run.directory) / "loader-0.log"
    env = {**environment(settings, "loader-0"), **variables}
    argv = (
        (sys.executable, str(Path(__file__).with_name("dying_loader.py")), *doom)
        if doom
        else (*TURNLOG, "role", "loader")
    )
    return Child(Launch(name="loader-0", argv=argv, log=log, env=env)).start()


@contextmanager
def engine(settings: Settings, kind: str) -> Iterator[Settings]:
    """Settings with an engine that runs, and its model."""
    folder = Path(settings.run.directory)
    if kind == "real":
        model = make_tiny_model(folder / "tiny")
        with EngineServer(model, EngineSettings(), log=folder / "engine.log") as real:
            yield _with(settings, model, real.url)
        return
    settings = with_model(settings)
    tensors = {name: torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) for name in "abcd"}
    save_file(tensors, str(Path(settings.model.path) / "model.safetensors"))
    url = settings.engine.urls[0]
    script = str(Path(__file__).with_name("scripted_engine.py"))
    argv = (sys.executable, script, url.rpartition(":")[2], settings.model.path, "--unscripted")
    launch = Launch(name="engine-0", argv=argv, log=folder / "engine.log", ready=lambda: up(f"{url}/ready"))
    child = Child(launch).start()
    try:
        child.wait_ready()
        yield settings
    finally:
        child.stop()


def _with(settings: Settings, model: Path, url: str) -> Settings:
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, path=str(model)),
        engine=dataclasses.replace(settings.engine, urls=(url,)),
    )


class Stream:
    """Versions, as a trainer publishes them."""

    def __init__(self, role: Role, control: SGLangControl) -> None:
        self._role, self._control = role, control
        self._model = Path(role.settings.model.path)
        exports = Path(role.settings.run.directory) / "exports"
        self._trainer = Publications(role.blobs, self._model, exports, chain=CHAIN, run_id=role.settings.run.id)
        self._first = {name: tensor.float() for name, tensor in read_weights(self._model).items()}
        self._weights = dict(self._first)
        self._matrices = sorted(name for name, tensor in self._first.items() if tensor.dim() > 1)
        self.newest = -1
        self.good = -1
        """The newest that can be loaded."""

    async def publish(self) -> None:
        """The next one: one matrix is another, or is of another shape in a version that nobody can load."""
        number, role = self.newest + 1, self._role
        name = self._matrices[number % len(self._matrices)]
        if number % BAD_EVERY == BAD_EVERY - 1:
            spoiled = self._weights | {name: self._weights[name][:-1].contiguous()}
            event = await version(spoiled, number, role.blobs, self._model, run_id=role.settings.run.id)
        else:
            first = self._first[name]
            noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(number))
            self._weights[name] = first + noise * first.std()
            event = await self._trainer.version(self._weights, number)
            self.good = number
        await role.events.append(event)
        self.newest = number

    async def go_on(self) -> None:
        """Until it is cancelled, at the pace of loaders."""
        while True:
            if self.newest - (await self._control.model_info()).label < AHEAD:
                await self.publish()
            await asyncio.sleep(PAUSE_S)


async def ask(engine: SGLang) -> OutputChunk:
    """The likeliest answer."""
    request = Generate(rid=uuid4().hex, input_ids=PROMPT, temperature=0.0, max_new_tokens=TOKENS)
    (piece,) = [piece async for piece in engine.generate(request, stream=False, timeout_s=PATIENCE_S)]
    return piece


async def ask_on(engine: SGLang, answers: list[OutputChunk]) -> None:
    """Until it is cancelled."""
    while True:
        answers.append(await ask(engine))
        await asyncio.sleep(PAUSE_S)


async def kill(settings: Settings, story: Story, *, kills: int, rng: random.Random) -> None:
    """In a fetch and in a swap in turn."""
    for number in range(2 * kills):
        kind = (FETCH, SWAP)[number % 2][number // 2 % len(SWAP)]
        child = loader(settings, kind, str(rng.getrandbits(32)))
        await until(functools.partial(ended, child), PATIENCE_S)
        if child.returncode != -signal.SIGKILL:
            story.faults.append(f"a loader that was to die in a call of {kind} ended with {child.returncode}")
            say(child.tail())
            child.kill()
            continue
        story.struck[kind] += 1
        say(f"kill {story.struck.total()}: {kind}")


async def has(control: SGLangControl, version: int) -> bool:
    """Whether the engine gets it in a while."""
    deadline = time.monotonic() + PATIENCE_S
    while (await control.model_info()).label != version and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return (await control.model_info()).label == version


async def torture(settings: Settings, role: Role, story: Story, *, kills: int, seed: int) -> Stream:
    """What was published, once the last loader has loaded the newest and was stopped."""
    asked, control = SGLang(settings.engine.urls[0]), SGLangControl(settings.engine.urls[0])
    stream = Stream(role, control)
    await stream.publish()
    child = loader(settings)
    if not await has(control, 0):
        say(child.tail())
    child.kill()
    work = [asyncio.create_task(ask_on(asked, story.answers)) for _ in range(CLIENTS)]
    work.append(asyncio.create_task(stream.go_on()))
    await kill(settings, story, kills=kills, rng=random.Random(seed))
    work.pop().cancel()
    child = loader(settings)
    if not await has(control, stream.good):
        story.faults.append(f"the engine never had version {stream.good}")
    begun = len(story.answers)
    await until(lambda: len(story.answers) > begun + CLIENTS or any(one.done() for one in work), PATIENCE_S)
    for one in work:
        one.cancel()
    ends = await asyncio.gather(*work, return_exceptions=True)
    story.faults += [f"a client saw {end!r}" for end in ends if not isinstance(end, asyncio.CancelledError)]
    story.exit_status = child.stop()
    await asked.close()
    await control.close()
    return stream


async def references(
    role: Role, published: dict[int, WeightVersionPublished], of: Iterable[int]
) -> dict[int, OutputChunk]:
    """What the engine answers under each of these versions, handed to it from the store."""
    found, url = {}, role.settings.engine.urls[0]
    asked, control = SGLang(url), SGLangControl(url)
    for number in of:
        folder = Path(role.settings.run.directory) / f"reference-{number}"
        folder.mkdir()
        await assemble_version(chain_of(published[number], published), role.blobs, folder)
        await control.pause()
        await control.load(folder, number, timeout_s=60.0)
        await control.resume()
        found[number] = await ask(asked)
    await asked.close()
    await control.close()
    return found


def labels(answer: OutputChunk) -> list[str]:
    """The version of each token."""
    return [label for label, count in answer.versions for _ in range(count)]


def is_of(answer: OutputChunk, found: dict[int, OutputChunk], *, bits: bool) -> bool:
    """Whether each token's log-prob is that of the version that it is labelled with; `bits`: it follows from the
    weights of its own instant alone, else tokens behind a swap are not compared."""
    its = labels(answer)
    if len(its) != len(answer.logprobs) or not {*its} <= {str(number) for number in found}:
        return False
    compared = [at for at, label in enumerate(its) if bits or label == its[0]]
    return all(math.isclose(answer.logprobs[at], found[int(its[at])].logprobs[at], abs_tol=SAME) for at in compared)


def verdict(story: Story, events: Sequence[Event], stream: Stream, found: dict[int, OutputChunk], *, bits: bool) -> int:
    """Print the line."""
    loads = [event for event in events if isinstance(event, EngineWeightsLoaded)]
    refused = {event.refused_version for event in events if isinstance(event, EngineWeightsRefused)}
    said = Counter(itertools.chain.from_iterable((one.version, *one.superseded) for one in loads))
    lost = sorted(set(range(stream.newest + 1)) - said.keys() - refused)
    twice = sum(count - 1 for count in said.values())
    back = sum(one.version >= other.version for one, other in itertools.pairwise(loads))
    strange = [answer for answer in story.answers if not is_of(answer, found, bits=bits)]
    for answer in strange[:5]:
        say(f"of no published weights: {answer}")
    ok = not (lost or twice or back or strange or story.faults or story.exit_status)
    over_two = sum(len(answer.versions) > 1 for answer in story.answers)
    return told(
        id="loader", kills=story.struck.total(), lost=len(lost), twice=twice, skipped=back, identical=not strange,
        ok=ok,
        detail={
            "struck": dict(story.struck), "versions": stream.newest + 1, "loaded": len(loads), "refused": len(refused),
            "answers": len(story.answers), "versions_answered_by": len(found), "over_two_versions": over_two,
            "exit_status": story.exit_status, "faults": story.faults, "unanswered": lost,
        },
    )  # fmt: skip


async def tried(settings: Settings, *, kills: int, seed: int, bits: bool) -> int:
    """The whole story; the exit status."""
    story = Story()
    async with open_role("chaos", settings) as role:
        stream = await torture(settings, role, story, kills=kills, seed=seed)
        published = {
            event.version: event
            for _, _, event in await everything(role, WEIGHTS.name)
            if isinstance(event, WeightVersionPublished)
        }
        used = {label for answer in story.answers for label, _ in answer.versions if label.isdecimal()}
        say(f"{len(story.answers)} answers by {len(used)} of {len(published)} versions")
        found = await references(role, published, sorted(published.keys() & set(map(int, used))))
        events = [event for _, _, event in await everything(role, ENGINES.name)]
    return verdict(story, events, stream, found, bits=bits)


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Kill the loader while it fetches and swaps.")
    parser.add_argument("--kills", type=int, default=20, help="in a fetch, and as many in a swap")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("scripted", "real"), default="scripted")
    arguments = parser.parse_args()
    with servers(f"chaos-{uuid4().hex[:8]}") as settings, engine(settings, arguments.engine) as settings:
        bits = arguments.engine == "scripted"
        return asyncio.run(tried(settings, kills=arguments.kills, seed=arguments.seed, bits=bits))


if __name__ == "__main__":
    raise SystemExit(main())
