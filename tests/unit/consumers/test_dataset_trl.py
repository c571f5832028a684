"""TRL trains on the views `sft` and `preference` as the page says: loaded from the folder, without a map."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import CHAT_TEMPLATE, _shape, tiny_tokenizer, write_model
from tests.unit.consumers.test_dataset_views import CALL, Said, World, world  # noqa: F401 - a fixture
from turnlog.consumers.datasets.build import build
from turnlog.consumers.datasets.query import Query

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
PAGE = Path(__file__).parents[3] / "docs/datasets.md"
TEMPLATE = "{% for tool in tools or [] %}offers {{ tool.function.name }} {% endfor %}" + CHAT_TEMPLATE
OPTIONS: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True,
    "bf16": False, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False,
}  # fmt: skip


def of_page(name: str) -> Callable[..., Any]:
    """A function of docs/datasets.md."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {}
    exec(next(block for block in blocks if f"def {name}(" in block), found)
    function: Callable[..., Any] = found[name]
    return function


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library asks the Hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny random Qwen3 whose template shows tools."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tiny_tokenizer(chat_template=TEMPLATE)
    return write_model(tmp_path / "model", tokenizer, Qwen3ForCausalLM, Qwen3Config(**_shape(tokenizer)), 0)


async def record(world: World) -> None:  # noqa: F811
    """Two groups whose sessions call a tool and part then."""
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for number in range(2):
        await world.group(
            f"g{number}", Said((call, f"it is {number + 5}")), Said((call, "no idea"), reward=0.0), tokens=number
        )


def check(trainer: Any, before: dict[str, Any]) -> None:
    """Two steps, with finite losses that moved the weights."""
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert trainer.state.global_step == len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert all(loss > 0 for loss in losses)
    after = trainer.model.state_dict()
    assert any((after[name] != value).any() for name, value in before.items())


def weights(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


async def test_trl_fine_tunes_on_conversations_with_their_tools(
    world: World,  # noqa: F811
    model: Path,
    tmp_path: Path,
) -> None:
    await record(world)
    await build(world.role, Query(best_of_group=True), tmp_path / "sft", view="sft", format="arrow")
    trainer = of_page("sft")(tmp_path / "sft", model, tmp_path / "trained", **OPTIONS)
    check(trainer, weights(model))
    said = sorted(trainer.processing_class.batch_decode(trainer.train_dataset["input_ids"][:]))
    assert said == [
        "offers python <|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n2 + 3 = ?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name":"python","arguments":{"code":"2+3"}}</tool_call><|im_end|>\n'
        f"<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\nit is {number}<|im_end|>\n"
        for number in (5, 6)
    ]


async def test_trl_prefers_the_better_session_of_a_group(
    world: World,  # noqa: F811
    model: Path,
    tmp_path: Path,
) -> None:
    await record(world)
    await build(world.role, Query(), tmp_path / "pairs", view="preference", format="parquet")
    trainer = of_page("dpo")(tmp_path / "pairs", model, tmp_path / "trained", **OPTIONS)
    check(trainer, weights(model))
    pairs = trainer.train_dataset
    for column, wanted in (("chosen_ids", ["it is 5", "it is 6"]), ("rejected_ids", ["no idea", "no idea"])):
        assert sorted(trainer.processing_class.batch_decode(pairs[column][:])) == [
            f"{text}<|im_end|>\n" for text in wanted
        ]
    for prompt in trainer.processing_class.batch_decode(pairs["prompt_ids"][:]):
        assert prompt.startswith("offers python <|im_start|>system\nbe brief<|im_end|>")
        assert prompt.endswith("<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n")
