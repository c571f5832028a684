"""The policy of a recipe without a model: a random tiny model at once, its warm start when the trainer first needs it.

Both are cached below $XDG_CACHE_HOME/turnlog/models, named by everything that they are a function of.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from turnlog.infra.embedded.servers import check_model
from turnlog.infra.environments.sources import task_source, warm_start_of
from turnlog.infra.environments.tasks import TaskSource
from turnlog.infra.environments.warm_starts import WarmStart
from turnlog.infra.run_folder import lock_file
from turnlog.schemas.canonical import canonical_text
from turnlog.settings import Settings
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.model_folder import check_folder

FORMAT = "1"
"""Must be changed whenever the same settings would make another model."""
LEARNING_RATE = 8e-4
WARM_START_RATE = 3e-3
"""Learning rate of the warm start, for every tiny model: `[trainer] warm_start_steps` decides how far it goes."""
"""Learning rate for such a policy if [trainer] learning_rate is 0: a thousand times the rate for a full-size model."""
VLLM_HEAD = 32
Progress = Callable[[int, int, float], None]
"""Called with (steps taken, total steps, loss)."""


class NoPolicy(Exception):
    """There is no policy. Remedy: set [model] path to a Hugging Face folder, since it is empty and the recipe has no
    warm start.
    """


def prepare_model(settings: Settings, env: Mapping[str, str] = os.environ) -> Settings:
    """Return settings whose model.path exists: the user's model, else the recipe's random tiny model.

    For the latter, trainer.initial_weights names the folder of its warm start, which may not exist yet, and learning
    rate and dtype suit it. Raises NoPolicy, UnknownRecipe, and for the user's own model ModelMissing, UnsupportedModel,
    ModelDamaged, before any server is started for it.
    """
    if settings.model.path:
        check_model(Path(settings.model.path))
        check_folder(Path(settings.model.path))
        return settings
    chosen = task_source(settings.feeder.recipe)
    start = _warm_start(chosen)
    cache = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnlog" / "models"
    key = _key(start, settings, steps=0)  # sources of one name differ in their options
    tokenizer, base = cache / f"{chosen.name}-tokenizer-{key}", cache / f"{chosen.name}-base-{key}"
    if not (base / "config.json").exists():
        _write_whole(tokenizer, start.write_tokenizer)
        _write_whole(base, lambda part: _base(start, settings, tokenizer, part))
    warm = cache / f"{chosen.name}-warm-{_key(start, settings, steps=settings.trainer.warm_start_steps)}"
    replace, trainer = dataclasses.replace, settings.trainer
    return replace(
        settings,
        model=replace(settings.model, path=str(base)),
        trainer=replace(
            trainer,
            initial_weights=trainer.initial_weights or str(warm),
            learning_rate=trainer.learning_rate or LEARNING_RATE,
            dtype="float32" if trainer.dtype == "auto" else trainer.dtype,
        ),
    )


def initial_weights(settings: Settings, progress: Progress = lambda *_: None) -> Path:
    """Return the folder of the weights of version 0; run the recipe's warm start first if they are missing."""
    if not settings.trainer.initial_weights:
        return Path(settings.model.path)
    folder = Path(settings.trainer.initial_weights)
    if not (folder / "config.json").exists():
        start = _warm_start(task_source(settings.feeder.recipe))
        _write_whole(folder, lambda part: _warm(start, settings, part, progress))
    return folder


def copy_model(model: Path, folder: Path) -> Path:
    """Return `folder` after copying `model` into it, unless it exists: its content may already be served and
    trained.
    """
    _write_whole(folder, lambda part: shutil.copytree(model, part, dirs_exist_ok=True))
    return folder


def _warm_start(chosen: TaskSource) -> WarmStart:
    start = warm_start_of(chosen)
    if start is None:
        raise NoPolicy(
            f"[model] path is empty and recipe {chosen.name!r} has no warm start: set [model] path to a model folder"
        )
    return start


def _base(start: WarmStart, settings: Settings, tokenizer: Path, folder: Path) -> None:
    from turnlog.trainer.warm_start import make_base

    make_base(_shape(start, settings, tokenizer), tokenizer, folder, seed=settings.trainer.warm_start_seed)


def _warm(start: WarmStart, settings: Settings, folder: Path, progress: Progress) -> None:
    from turnlog.trainer.warm_start import warm_start

    trainer, base = settings.trainer, Path(settings.model.path)
    rows = ((row.token_ids, row.mask) for row in start.rows(base, trainer.warm_start_seed))
    warm_start(
        read_shape(base),
        base,
        rows,
        steps=trainer.warm_start_steps,
        learning_rate=WARM_START_RATE,
        seed=trainer.warm_start_seed,
        folder=folder,
        progress=lambda step, loss: progress(step, trainer.warm_start_steps, loss),
        threads=trainer.threads,
    )


def _shape(start: WarmStart, settings: Settings, folder: Path) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(_config(start, settings)))
    return read_shape(folder)


def _config(start: WarmStart, settings: Settings) -> dict[str, Any]:
    """Return the model's config.json. vLLM's attention on a CPU has no heads narrower than VLLM_HEAD."""
    config, engine = start.model.config(), settings.engine
    on_vllm = "vllm" in engine.named_kinds and engine.device == "cpu"
    return config | ({"head_dim": max(VLLM_HEAD, config["head_dim"])} if on_vllm else {})


def _key(start: WarmStart, settings: Settings, *, steps: int) -> str:
    trainer = settings.trainer
    demonstrations = [dataclasses.asdict(one) for one in itertools.islice(start.demonstrations(0), 8)]
    about = [FORMAT, _config(start, settings), demonstrations, trainer.warm_start_seed, steps, WARM_START_RATE]
    return hashlib.sha256(canonical_text(about, spaces=True).encode()).hexdigest()[:12]


def _write_whole(folder: Path, write: Callable[[Path], object]) -> None:
    """Create `folder` atomically unless it exists; a second process waits for it. Remains of a killed process are
    removed.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    part, lock = (folder.with_name(f"{folder.name}.{kind}") for kind in ("part", "lock"))
    with lock_file(lock):
        shutil.rmtree(part, ignore_errors=True)
        if not folder.exists():
            part.mkdir()
            write(part)
            os.replace(part, folder)
