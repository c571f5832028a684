"""A model of the user's own is looked at before anything is started for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnlog.infra.embedded import ModelMissing
from turnlog.settings import ModelSettings, Settings
from turnlog.trainer import UnsupportedModel
from turnlog.trainer.tiny_policy import prepare_model


def test_an_id_of_the_hub_is_told_as_one_with_how_to_get_it() -> None:
    with pytest.raises(
        ModelMissing, match=r"not downloaded from the Hugging Face Hub: run `hf download Qwen/Qwen3-0\.6B --local-dir"
    ):
        prepare_model(Settings(model=ModelSettings(path="Qwen/Qwen3-0.6B")))


def test_a_model_that_nobody_here_trains_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(UnsupportedModel, match="model_type 'gpt2'"):
        prepare_model(Settings(model=ModelSettings(path=str(tmp_path))))
