"""A model of the user's own is looked at before anything is started for it."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from tests.each import each
from tests.reference.small_models import GPT_OSS, LATENT
from turnlog.infra.embedded import ModelMissing
from turnlog.settings import ModelSettings, Settings
from turnlog.trainer import ModelDamaged, UnsupportedModel
from turnlog.trainer.families.family import QUANTIZED, config_json
from turnlog.trainer.families.shape import TINY, TINY_HYBRID, ModelShape
from turnlog.trainer.model_folder import check_folder
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


def write_tokenizer(folder: Path, tokens: int) -> Tokenizer:
    """Write a tokenizer of so many tokens, beside the config.json of a model that knows 384."""
    (folder / "config.json").write_text(json.dumps(config_json(TINY, eos_token_id=0, pad_token_id=0)))
    tokenizer = Tokenizer(WordLevel({f"word {number}": number for number in range(tokens)}, "word 0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_a_tokenizer_of_another_vocabulary_is_named_with_its_first_token_that_the_model_lacks(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, 384)
    assert check_folder(tmp_path) == TINY
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert check_folder(tmp_path) == TINY
    write_tokenizer(tmp_path, 386)
    with pytest.raises(ModelDamaged, match=r"tokenizer\.json has token 'word 384' .* vocab_size .* is 384"):
        check_folder(tmp_path)


def test_a_tokenizer_that_is_cut_short_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 10)
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes()[:-20])
    with pytest.raises(ModelDamaged, match=r"tokenizer\.json cannot be read as a tokenizer"):
        check_folder(tmp_path)


def test_a_quantized_model_is_refused_because_its_engines_could_not_load_the_next_weights(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 10)
    values = config_json(GPT_OSS, eos_token_id=0, pad_token_id=0)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert check_folder(tmp_path) == GPT_OSS
    (tmp_path / "config.json").write_text(json.dumps({**values, QUANTIZED: {"quant_method": "mxfp4"}}))
    with pytest.raises(UnsupportedModel, match=r"in mxfp4\. Engines .* write the model in bfloat16"):
        check_folder(tmp_path)


@each(
    "shape, key",
    [
        (TINY_HYBRID, "full_attention_interval"),
        (dataclasses.replace(LATENT, kind="glm4_moe_lite"), "first_k_dense_replace"),
    ],
)
def test_a_key_that_engines_need_and_transformers_does_not_write_is_named(shape: ModelShape, key: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder, 10)
        values = config_json(shape, eos_token_id=0, pad_token_id=0)
        (folder / "config.json").write_text(json.dumps(values))
        assert check_folder(folder) == shape
        del values[key]
        (folder / "config.json").write_text(json.dumps(values))
        with pytest.raises(UnsupportedModel, match=f"config.json has no {key}, which engines need: set it to"):
            check_folder(folder)
