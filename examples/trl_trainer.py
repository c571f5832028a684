"""Train a run of turnlog with TRL: its GRPOTrainer steps on finalized batches instead of generating completions.

    TURNLOG_RUN_DIRECTORY=runs/mine python examples/trl_trainer.py

The run needs `[trainer] kind = "external"`, and must be up (`turnlog up`, then `turnlog run`). Everything else is as
with turnlog's own trainer: agents, folds, token accounting, replay, the dashboard. docs/trainers.md says what differs.

The loss of a step is TRL's (`GRPOTrainer.compute_loss`). Three things make it that of turnlog's own trainer:

* The sum over trained tokens of token loss / weight_divisor. TRL allows advantages of shape [rows, tokens], so
  each is divided by its row's weight_divisor, and the loss type `dapo` sums tokens and divides by `num_items_in_batch`,
  which is 1. Padding and untrained tokens are masked by `completion_mask` and `tool_mask`.
* Old log-probs are the engine's, as recorded: `old_per_token_logps`.
* Log-probs are those of logits / temperature of the row. TRL fixes the temperature in its fused output layer, so there
  is one such layer for each temperature that occurs.

A checkpoint is a folder of transformers' Trainer with one file more, cursor.json: the place in the log up to which its
weights are trained. That file is written last, by a rename, so a folder that a kill left half-written does not count.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

import turnlog.client
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.settings import Settings

CURSOR = "cursor.json"
COLUMNS = ("token_ids", "trained", "logprobs", "advantages")
"""Columns of a batch's tokens that the loss reads."""
OF_SETTINGS = ("initial_lr", "betas", "weight_decay")


class TurnlogTrainer(GRPOTrainer):
    """GRPOTrainer whose batches come from a run and whose steps are reported to it."""

    def __init__(self, folder: Path, output: Path, source: Any, settings: Settings) -> None:
        """`folder` is the model, `output` the place of checkpoints, `source` what `run.trainer()` returns."""
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        policy.get_input_embeddings().padding_idx = None  # else a pad token in a prompt has no gradient
        super().__init__(
            policy,
            args=grpo_config(settings, output),
            processing_class=AutoTokenizer.from_pretrained(folder),
            # TRL demands both and would use them to generate. The batches have their rewards already.
            reward_funcs=[len],
            train_dataset=Dataset.from_dict({"prompt": [""]}),
        )
        self._source, self._settings = source, settings
        self._forwards = {self.temperature: self.model.forward}
        self._logprobs = self._entropies = torch.empty(0)

    def get_train_dataloader(self) -> Iterator[dict[str, Any]]:
        return ({"batch": batch} for batch in self._source)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None, steps: int = 0) -> None:
        self.lr_scheduler = LambdaLR(self.optimizer, functools.partial(share_of_rate, self._settings), steps - 1)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the moments. Learning rates, betas and weight decay are those of the settings, not of the checkpoint."""
        fresh = [{name: group[name] for name in OF_SETTINGS} for group in self.optimizer.param_groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            for group, values in zip(self.optimizer.param_groups, fresh, strict=True):
                group.update(values)
            self.create_scheduler(0, steps=self.lr_scheduler.last_epoch)

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        return {name: value.to(self.args.device) for name, value in generation_batch.items()}

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Sum the gradients of the batch's microbatches."""
        self._batch = inputs["batch"]
        self._measured: dict[str, list[np.ndarray]] = {"entropy": [], "clipped": []}
        self._masked = 0
        rows = self._batch.rows
        self._of_rows = np.full((len(rows), rows.lengths.max()), np.nan, "f4")
        loss = torch.zeros((), device=self.args.device)
        for part, tensors in microbatches(rows, self._settings.trainer.microbatch_tokens):
            temperature = float(rows.temperature[part[0]])
            if temperature <= 0:  # a greedy choice has no probability to compare with
                self._masked += int(tensors["tool_mask"].sum())
                continue
            self._set_temperature(temperature)
            loss = loss + super().training_step(model, tensors, None)
            self._measure(part, tensors)
        return loss

    def _set_temperature(self, temperature: float) -> None:
        if temperature not in self._forwards:
            add_fused_lm_head(self.model, temperature=temperature, outputs=("log_probs", "entropy"))
            self._forwards[temperature] = self.model.forward
        self.model.forward = self._forwards[temperature]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logprobs, self._entropies = found[0].detach().cpu(), found[1].detach().cpu()
        return found

    def _measure(self, part: list[int], tensors: dict[str, torch.Tensor]) -> None:
        self._of_rows[part, 1 : 1 + self._logprobs.shape[1]] = self._logprobs.float().numpy()
        trained = tensors["tool_mask"] == 1
        ratio = (self._logprobs - tensors["old_per_token_logps"])[trained].exp()
        rising = tensors["advantages"][trained] > 0
        clipped = torch.where(rising, ratio > 1 + self.epsilon_high, ratio < 1 - self.epsilon_low)
        for name, values in (("entropy", self._entropies[trained]), ("clipped", clipped)):
            self._measured[name].append(values.float().numpy())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report the step. transformers calls this after the optimizer and before it saves a checkpoint."""
        if "grad_norm" in logs:
            self._report(logs)
        super().log(logs, start_time)

    def _report(self, logs: dict[str, float]) -> None:
        if not math.isfinite(logs["loss"]) or not math.isfinite(logs["grad_norm"]):
            raise FloatingPointError(
                f"batch {self._batch.manifest.batch_index}: loss {logs['loss']}, gradient norm {logs['grad_norm']}: "
                "the step is neither reported nor saved; restart with a lower learning rate"
            )
        values = {name: np.concatenate(found or [np.zeros(1, "f4")]) for name, found in self._measured.items()}
        self._source.step_completed(
            self._batch,
            loss=logs["loss"],
            grad_norm=logs["grad_norm"],
            learning_rate=logs["learning_rate"],
            logprobs=self._of_rows,
            entropy=float(values["entropy"].mean()),
            clip_fraction=float(values["clipped"].mean()),
            masked_tokens=self._masked,
        )
        if self._source.publication_is_due:
            export = Path(self.args.output_dir, "export")
            self.model.save_pretrained(export)
            self._source.publish(export)
            shutil.rmtree(export)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        part = folder / f"{CURSOR}.part"
        part.write_text(json.dumps(self._source.cursor))
        for file in folder.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())  # else a power cut may leave the cursor without the weights
        self._source.check_owner()
        part.replace(folder / CURSOR)


def microbatches(rows: BatchRows, tokens: int) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
    """Cut a batch into parts of one temperature with at most `tokens` padded tokens, but at least one row; yield the
    indices of the rows, and what GRPOTrainer computes the loss of.
    """
    lengths, temperatures = rows.lengths.tolist(), rows.temperature.tolist()
    columns = {name: torch.tensor(getattr(rows, name)).split(lengths) for name in COLUMNS}
    part: list[int] = []
    for row in (*np.lexsort((rows.lengths, rows.temperature)).tolist(), None):
        if part and (
            row is None or temperatures[row] != temperatures[part[0]] or lengths[row] * (len(part) + 1) > tokens
        ):
            padded = {name: pad_sequence([column[one] for one in part], True) for name, column in columns.items()}
            yield part, loss_inputs(padded, rows.lengths[part], rows.weight_divisor[part])
            part = []
        part.append(row)


def loss_inputs(
    padded: dict[str, torch.Tensor], lengths: NDArray[np.int32], divisor: NDArray[np.int64]
) -> dict[str, torch.Tensor]:
    """Return the columns [rows, tokens] by TRL's names: the first token of each row is its prompt."""
    ids, mask = padded["token_ids"].long(), torch.arange(lengths.max()) < torch.tensor(lengths)[:, None]
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1].long(),
        "completion_ids": ids[:, 1:],
        "completion_mask": mask[:, 1:].long(),
        "tool_mask": padded["trained"][:, 1:].long(),
        "advantages": padded["advantages"][:, 1:] / torch.tensor(divisor)[:, None],
        "old_per_token_logps": padded["logprobs"][:, 1:],
        "num_items_in_batch": torch.ones(()),
    }


def share_of_rate(settings: Settings, step: int) -> float:
    """Return the share of [trainer] learning_rate after `step` steps, as turnlog's own trainer computes it."""
    trainer, planned = settings.trainer, settings.feeder.draws * settings.batcher.updates_per_draw
    if step < trainer.warmup_steps:
        return (step + 1) / (trainer.warmup_steps + 1)
    if trainer.learning_rate_schedule == "constant":
        return 1.0
    done = min(1.0, (step - trainer.warmup_steps) / max(1, planned - trainer.warmup_steps))
    left = (1.0 + math.cos(math.pi * done)) / 2.0 if trainer.learning_rate_schedule == "cosine" else 1.0 - done
    return trainer.min_learning_rate_ratio + (1.0 - trainer.min_learning_rate_ratio) * left


def grpo_config(settings: Settings, output: Path) -> GRPOConfig:
    """Return TRL's arguments for the run's [trainer] settings. Raises ValueError for a loss that this does not have."""
    trainer = settings.trainer
    wanted: dict[str, Any] = {"algorithm": "grpo", "logprobs": "recorded", "importance": "none", "kl": "none"}
    wanted |= {"auxiliary": "none", "entropy_coefficient": 0, "teacher": "", "moe_aux_loss_coeff": 0, "lora_rank": 0}
    for name, value in wanted.items():
        if getattr(trainer, name) != value:
            raise ValueError(f"[trainer] {name} is {getattr(trainer, name)!r}: this example trains only {value!r}")
    cuda = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(output),
        max_steps=settings.feeder.draws * settings.batcher.updates_per_draw,
        learning_rate=trainer.learning_rate or 1e-6,
        adam_beta1=trainer.beta1,
        adam_beta2=trainer.beta2,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.clip_grad,
        epsilon=trainer.clip_low,
        epsilon_high=trainer.clip_high,
        delta=trainer.dual_clip or None,
        loss_type="dapo",
        beta=0.0,
        per_device_train_batch_size=2,  # only checked against num_generations: batches are as the batcher formed them
        num_generations=2,
        save_steps=trainer.checkpoint_every,
        save_total_limit=max(2, trainer.checkpoints_kept),  # old ones are removed before the new one has its cursor
        logging_steps=1,
        logging_nan_inf_filter=False,  # else a loss that is not finite is replaced by a mean
        gradient_checkpointing=False,
        bf16=trainer.dtype == "bfloat16" or (trainer.dtype == "auto" and cuda),
        use_cpu=not cuda,
        ignore_data_skip=True,  # the cursor says where the data continue
        report_to="none",
        disable_tqdm=True,
        seed=trainer.seed,
    )


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint: of the highest generation that has one, the one after most steps."""

    def age(cursor: Path) -> tuple[int, int]:
        return int(cursor.parent.parent.name.partition("-")[2]), int(cursor.parent.name.partition("-")[2])

    found = max(folder.glob(f"generation-*/checkpoint-*/{CURSOR}"), key=age, default=None)
    return found and found.parent


def take_over(folder: Path, generation: int, held: Path | None) -> Path:
    """Move the checkpoint to start from into this generation's folder, and return that folder.

    A predecessor that is not dead yet then changes nothing that a successor resumes from, also if it comes here later.
    """
    own = folder / f"generation-{generation}"
    own.mkdir(parents=True, exist_ok=True)
    if held is not None:
        os.replace(held, own / held.name)
    for other in folder.glob("generation-*"):
        if int(other.name.partition("-")[2]) < generation:
            shutil.rmtree(other, ignore_errors=True)
    return own


def main() -> None:
    """Train the run that the environment names, from its newest checkpoint, until its rollout batches are trained."""
    disable_progress_bar()
    run = turnlog.client.connect()
    settings = run.settings
    folder = Path(settings.run.directory, "trl")
    held = newest_checkpoint(folder)
    cursor = None if held is None else json.loads((held / CURSOR).read_text())
    with run.trainer(cursor=cursor) as source:
        own = take_over(folder, source.generation, held)
        begun = None if held is None else own / held.name
        model = Path(settings.trainer.initial_weights or settings.model.path) if begun is None else begun
        if source.publication_is_due:
            source.publish(model)
        torch.set_num_threads(settings.trainer.threads)
        trainer = TurnlogTrainer(model, own, source, settings)
        trainer.train(resume_from_checkpoint=None if begun is None else str(begun))


if __name__ == "__main__":
    main()
