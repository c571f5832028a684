"""Kill a trainer that is not turnlog's, again and again: `python benchmarks/chaos/trainer_trl.py [--kills 20]
[--kinds step,commit]`.

As trainer.py does it, with examples/trl_trainer.py: finalized batches wait on the log, and the process is killed by
SIGKILL in turns while it steps, publishes, commits, saves a checkpoint, and starts.

In the end the history that counts (the highest generation per batch) must hold every batch once, and every loss of
every generation must be that of turnlog's own trainer over the same manifests, to 1e-5: a batch that was trained twice,
or not at all, changes the losses after it by more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

from dying import doom
from servers import environment, servers

from trainer import LATEST, START, of_tiny_model, torture, verdict
from turnlog.infra.embedded.process import Child, Launch
from turnlog.settings import Settings

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/trl_trainer.py"
KINDS = ("step", "publish", "commit", "save")
WITHIN = 1e-5


def example() -> ModuleType:
    """Return examples/trl_trainer.py."""
    sys.path.append(str(EXAMPLE.parent))
    import trl_trainer

    return trl_trainer


def start(settings: Settings, *doom: str) -> Child:
    """Start the example, or one that dies of itself."""
    trainer = settings.trainer
    variables = {
        "TURNLOG_MODEL_PATH": settings.model.path,
        "TURNLOG_FEEDER_DRAWS": str(settings.feeder.draws),
        "TURNLOG_TRAINER_KIND": "external",
        "TURNLOG_TRAINER_LEARNING_RATE": str(trainer.learning_rate),
        "TURNLOG_TRAINER_THREADS": str(trainer.threads),
        "TURNLOG_TRAINER_CHECKPOINT_EVERY": str(trainer.checkpoint_every),
        "HF_HUB_OFFLINE": "1",
    }
    log = Path(settings.run.directory) / "trainer-0.log"
    env = {**environment(settings, "trainer-0"), **variables}
    argv = (sys.executable, __file__ if doom else str(EXAMPLE), *doom)
    return Child(Launch(name="trainer-0", argv=argv, log=log, env=env)).start()


def places(kind: str) -> tuple[Any, str]:
    """Return what is called while the trainer does that: (owner, name)."""
    from turnlog.client.trainer import ExternalTrainer
    from turnlog.infra.event_log import EventLog

    ours = example().TurnlogTrainer
    return {
        "step": (ours, "training_step"),
        "publish": (ExternalTrainer, "publish"),
        "commit": (EventLog, "transact"),
        "save": (ours, "_save_checkpoint"),
    }[kind]


def doomed(kind: str, seed: int) -> int:
    """Be a trainer that dies in the middle of a call of that kind."""
    rng = random.Random(seed)
    owner, name = places(kind)
    doom(owner, name, 1 if kind == "save" else rng.randint(1, LATEST), rng.random())
    example().main()
    return 0


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Kill a trainer of TRL while it trains.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join((*KINDS, START)), help="what is under way")
    parser.add_argument("--dies-in", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dies_in:
        return doomed(arguments.dies_in, arguments.seed)
    with servers(f"chaos-{uuid4().hex[:8]}") as settings:
        settings = of_tiny_model(settings, arguments.kills)
        kinds = arguments.kinds.split(",")
        story = asyncio.run(torture(settings, kinds, kills=arguments.kills, seed=arguments.seed, start=start))
        return verdict(settings, *story, id="trainer_trl", within=WITHIN)


if __name__ == "__main__":
    raise SystemExit(main())
