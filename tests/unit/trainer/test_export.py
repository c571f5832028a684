"""`turnlog export`: published weights and checkpoints as folders that transformers loads, or nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes.batches import synthetic_model, synthetic_rows
from tests.fakes.weights import upload
from tests.unit.consumers.conftest import SETTINGS, TrainedRun
from turnlog.plugins.offline.export import (
    Exported,
    ExportRefused,
    OnlyAnnounced,
    WeightsDamaged,
    export_checkpoint,
    export_version,
    published_versions,
)
from turnlog.settings import ModelSettings, RunSettings, StoreSettings
from turnlog.trainer import CheckpointUnusable, mcore
from turnlog.trainer.checkpoints.places import FolderPlace, StorePlace
from turnlog.trainer.export import ExportedWeights
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.manifests import Cursor
from turnlog.trainer.models.output import output_weight
from turnlog.trainer.plan import LearnerOptions, imitation
from turnlog.trainer.warm_start import random_weights
from turnlog.trainer.weight_records import version_event

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TOKENS = torch.tensor([[1, 5, 9, 200, 7, 2]])


@dataclasses.dataclass
class Steps:
    """A run with the first weights, and those after two steps, published with their checkpoint."""

    run: TrainedRun
    place: FolderPlace
    checkpoint: Path
    logits: torch.Tensor
    """Megatron's, of the newest weights."""


@pytest.fixture
async def steps(tmp_path: Path, request: pytest.FixtureRequest) -> Steps:
    model = synthetic_model(tmp_path / "policy")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (model / "generation_config.json").unlink()
    settings = dataclasses.replace(
        SETTINGS, run=RunSettings(id="run", directory=str(tmp_path)), model=ModelSettings(path=str(model))
    )
    run = TrainedRun(settings)
    checkpoint = tmp_path / "checkpoints" / "step-00000002-i0"
    checkpoint.mkdir(parents=True)
    with process_group():
        rank, of = getattr(request, "param", (0, "merged"))
        learner = Learner(TINY, random_weights(TINY, 1), LearnerOptions(lora_rank=rank))
        await publish(run, learner, version=0, of="base" if of == "adapter" else "merged")
        for seed in range(2):
            learner.step(synthetic_rows(seed), imitation, 1e-2)
        learner.save(checkpoint, {})
        await publish(run, learner, version=1, checkpoint=checkpoint, of=of)
        with torch.no_grad(), mcore.quiet():
            hidden = learner.policy.model(TOKENS, torch.arange(6)[None], None)
            logits = (hidden @ output_weight(learner.policy.model).T)[..., : TINY.vocabulary].clone()
    return Steps(run, FolderPlace(checkpoint.parent), checkpoint, logits)


async def publish(
    run: TrainedRun, learner: Learner, *, version: int, checkpoint: Path | None = None, of: ExportedWeights = "merged"
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        written = learner.export_files(Path(folder), of)
        assert written is not None
        files = await upload(Path(folder), written.sha256, Path(run.settings.model.path), run.objects)
    cursor = Cursor(step=2 * version, next_batch=2 * version)
    await run.append([version_event(written, files, run_id="run", version=version, incarnation=0, cursor=cursor,
                                checkpoint=str(checkpoint) if checkpoint else None,
                                adapts=0 if of == "adapter" else None)])  # fmt: skip


def there(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def loaded_logits(folder: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
    return logits


async def test_the_newest_version_loads_in_transformers_and_says_what_the_trainer_says(
    steps: Steps, tmp_path: Path
) -> None:
    out = tmp_path / "models" / "calc"
    done = await export_version(steps.run.role(), out, None)
    torch.testing.assert_close(loaded_logits(out), steps.logits, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token == "<|im_end|>"
    assert '"eos_token_id": 2' in (out / "generation_config.json").read_text()
    card = (out / "README.md").read_text()
    assert all(said in card for said in ("| run | run |", "| weight version | 1 |", "| optimizer steps | 2 |"))
    assert done.parameters == sum(tensor.numel() for tensor in random_weights(TINY, 1).values())
    assert [path.name for path in there(out.parent)] == ["calc"]


EACH = [(0, "merged"), (4, "merged"), (4, "adapter")]


@pytest.mark.parametrize("steps", EACH, ids=["all weights", "merged adapters", "adapters"], indirect=True)
async def test_a_checkpoint_gives_the_weights_of_the_version_that_names_it(steps: Steps, tmp_path: Path) -> None:
    await export_version(steps.run.role(), tmp_path / "version", 1)
    versions = await published_versions(steps.run.role())
    done = export_checkpoint(steps.run.settings, steps.place, steps.checkpoint.name, tmp_path / "checkpoint", versions)
    assert done.version is not None
    names = ("model.safetensors", "config.json", "generation_config.json", "chat_template.jinja")
    for name in names:
        assert (tmp_path / "checkpoint" / name).read_bytes() == (tmp_path / "version" / name).read_bytes()
    assert "step-00000002-i0" in (tmp_path / "checkpoint" / "README.md").read_text()


async def test_a_checkpoint_in_the_store_gives_the_weights_of_one_in_a_folder(
    steps: Steps, tmp_path: Path, store: StoreSettings
) -> None:
    place = StorePlace(store, f"owned/{uuid4().hex}/checkpoints", tmp_path / "cache")
    versions = await published_versions(steps.run.role())

    def exported() -> Exported:
        place.store_files(steps.checkpoint, {}, {})
        return export_checkpoint(steps.run.settings, place, place.seal(steps.checkpoint), tmp_path / "out", versions)

    done = await asyncio.to_thread(exported)
    assert done.version is not None, "held against the checksums of the version that names it"
    torch.testing.assert_close(loaded_logits(tmp_path / "out"), steps.logits, rtol=0, atol=1e-5)


async def test_an_older_version_is_another_folder_and_an_unknown_one_is_refused(steps: Steps, tmp_path: Path) -> None:
    await export_version(steps.run.role(), tmp_path / "first", 0)
    assert not torch.allclose(loaded_logits(tmp_path / "first"), steps.logits, atol=1e-3)
    with pytest.raises(ExportRefused, match="no version 7; there are 0 to 1"):
        await export_version(steps.run.role(), tmp_path / "seventh", 7)
    with pytest.raises(CheckpointUnusable, match="step-9 is gone"):
        export_checkpoint(steps.run.settings, steps.place, "step-9", tmp_path / "ninth", [])


async def test_a_version_that_is_only_announced_has_no_files_and_the_nearest_that_have_are_named(
    steps: Steps, tmp_path: Path
) -> None:
    newest = (await published_versions(steps.run.role()))[-1]
    announced = dataclasses.replace(
        newest, version=2, event_id="2", files=(), checksums={}, state="announced", transport="direct",
        digests={"w": "0" * 16},
    )  # fmt: skip
    later = dataclasses.replace(announced, version=3, event_id="3")
    stored = dataclasses.replace(newest, version=4, event_id="4 durable", transport="direct")
    await steps.run.append([announced, later, dataclasses.replace(announced, version=4, event_id="4"), stored])
    with pytest.raises(
        OnlyAnnounced, match=r"version 3 .* only announced.*nearest with files: 1 and 4 \(\[weights\] durable_every"
    ):
        await export_version(steps.run.role(), tmp_path / "third", 3)
    assert not (tmp_path / "third").exists()
    done = await export_version(steps.run.role(), tmp_path / "newest", None)
    assert (done.version, len(there(tmp_path / "newest")) > 3) == (stored, True)


async def test_a_folder_that_exists_is_left_alone(steps: Steps, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(ExportRefused, match="already exists"):
        await export_version(steps.run.role(), taken, None)
    assert not there(taken)


async def test_weights_that_are_not_those_published_leave_nothing_behind(steps: Steps, tmp_path: Path) -> None:
    versions = await published_versions(steps.run.role())
    sums = dict(versions[-1].checksums)
    name, other = "model.norm.weight", versions[0].checksums["model.embed_tokens.weight"]
    lying = [
        dataclasses.replace(versions[-1], version=2, event_id="2", checksums={**sums, name: other}),
        dataclasses.replace(versions[-1], version=3, event_id="3", checksums={**sums, "more.weight": other}),
    ]
    await steps.run.append(lying)
    with pytest.raises(WeightsDamaged, match=r"version 2: model\.norm\.weight is"):
        await export_version(steps.run.role(), tmp_path / "out", 2)
    with pytest.raises(WeightsDamaged, match=r"1 tensors are missing or unknown, the first is more\.weight"):
        await export_version(steps.run.role(), tmp_path / "out", 3)
    with pytest.raises(WeightsDamaged, match=r"model\.norm\.weight is"):
        export_checkpoint(steps.run.settings, steps.place, steps.checkpoint.name, tmp_path / "out", lying[:1])
    assert {path.name for path in there(tmp_path)} == {"policy", "checkpoints"}
