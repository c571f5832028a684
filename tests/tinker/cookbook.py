"""The supervised loop of tinker_cookbook 0.6.1, unmodified, with a tokenizer and rows of our own:
`python cookbook.py URL MODEL_FOLDER LOG_FOLDER`. For an environment of tinker.lock. The last line is JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import chz
import tinker
from tinker_cookbook import renderers
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

STEPS, ROWS = 6, 2


class Sums(SupervisedDataset):
    """Small sums as conversations."""

    def __init__(self, folder: str) -> None:
        self._renderer = renderers.get_renderer("role_colon", get_tokenizer(folder))

    def __len__(self) -> int:
        return STEPS

    def set_epoch(self, seed: int = 0) -> None:
        """The order is always the same."""

    def get_batch(self, index: int) -> list[tinker.Datum]:
        rows = [(index % 3, number) for number in range(ROWS)]
        return [
            conversation_to_datum(
                [
                    {"role": "user", "content": f"What is {a} + {b}?"},
                    {"role": "assistant", "content": str(a + b)},
                ],
                self._renderer,
                max_length=200,
                train_on_what=renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES,
            )
            for a, b in rows
        ]


@chz.chz
class SumsBuilder(SupervisedDatasetBuilder):
    """Makes the rows."""

    folder: str

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        return Sums(self.folder), None


def main() -> None:
    """Train, and print the first and the last loss."""
    url, folder, log = sys.argv[1:]
    os.environ["TINKER_API_KEY"] = "tml-of-a-test-0123456789"
    config = train.Config(
        log_path=log,
        model_name=folder,
        recipe_name="sums",
        renderer_name="role_colon",
        dataset_builder=SumsBuilder(folder=folder),
        learning_rate=1e-2,
        lora_rank=4,
        base_url=url,
        save_every=3,
        eval_every=0,
    )
    asyncio.run(train.main(config))
    lines = [json.loads(line) for line in (Path(log) / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train_mean_nll"] for line in lines if "train_mean_nll" in line]
    saved = [json.loads(line) for line in (Path(log) / "checkpoints.jsonl").read_text().splitlines()]
    found = {"steps": len(losses), "first": losses[0], "last": losses[-1], "saved": [one["name"] for one in saved]}
    print(json.dumps({"supervised": found}), flush=True)


if __name__ == "__main__":
    main()
