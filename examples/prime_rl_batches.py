"""prime-rl's trainer on the batches of a turnlog run: `python examples/prime_rl_batches.py runs/mine outputs`.

The program takes the place of prime-rl's orchestrator. It writes each sealed batch as the micro batches of one step,
waits until the trainer has written the weights of that step, reports the step to turnlog and publishes the weights.
Start prime-rl's trainer after it, with `rollout_transport.type = "filesystem"`, `weight_broadcast.type =
"filesystem"`, a `monitors.file` section, and the same `output_dir`. docs/trainers.md describes what must agree.

Started again, the program goes on behind the newest checkpoint of the trainer, which repeats the same steps with the
same batches. If either of the two ends, stop the other one, and start both again in this order.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prime_rl.trainer.batch import build_bin_cost, prepare_batch
from prime_rl.transports.rollouts import FileSystemMicroBatchSender, MicroBatch, TrainingSample

from turnlog.processors.core.batches.rows import BatchRows

ENVIRONMENT = "turnlog"
"""Name under which prime-rl reports the metrics of these samples."""
POLL_S = 1.0
"""Pause between two looks at the folder that the trainer writes into, as in prime-rl itself."""


def training_samples(rows: BatchRows) -> list[TrainingSample]:
    """Return one TrainingSample per row, in the order of the rows. Both sides describe token t at index t.

    prime-rl divides the sum of the token losses of a step by N, the number of tokens with a weight. The weight of a
    trained token is therefore N / weight_divisor, so that the loss of a step is the one that turnlog defines. Weights
    are float32 in the trainer. A greedy row (temperature 0) raises ValueError: the trainer divides logits by it.
    """
    if (rows.temperature <= 0).any():
        raise ValueError("prime-rl cannot train rows that were sampled greedily; set [feeder] temperature above 0")
    total = int(rows.trained.sum())
    samples = []
    for row, start in enumerate(rows.starts.tolist()):
        own = slice(start, start + int(rows.lengths[row]))
        mask = rows.trained[own].astype(bool)
        samples.append(
            TrainingSample(
                token_ids=rows.token_ids[own].tolist(),
                mask=mask.tolist(),
                logprobs=rows.logprobs[own].tolist(),
                temperatures=[float(rows.temperature[row])] * len(mask),
                env_name=ENVIRONMENT,
                advantages=rows.advantages[own].tolist(),
                rl_weights=(mask * (total / int(rows.weight_divisor[row]))).tolist(),
            )
        )
    return samples


def micro_batches(
    rows: BatchRows, *, seq_len: int, ranks: int, pad_to: int = 1, model_config: Any = None
) -> list[list[MicroBatch]]:
    """Return the micro batches of one step, by data-parallel rank, packed by prime-rl's own code.

    `seq_len` is the trainer's `model.seq_len`. A longer row raises ValueError, because prime-rl would cut it without
    changing the weights. `pad_to`: multiple to which a micro batch is padded (with context parallelism, its degree).
    `model_config`: a Hugging Face config, by which prime-rl balances ranks; None balances by tokens.
    """
    longest = int(rows.lengths.max())
    if longest > seq_len:
        raise ValueError(f"a row has {longest} tokens, model.seq_len is {seq_len}; lower [batcher] max_tokens")
    return prepare_batch(training_samples(rows), seq_len, ranks, build_bin_cost(model_config), pad_to)


def wait_until(done: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Wait until `done()` is true. Raises TimeoutError, which names `what`."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"prime-rl's trainer did not write {what} within {timeout_s:g} s; see its log. A trainer that started "
                "before this program waits for other steps: stop both, and start this program first, then the trainer"
            )
        time.sleep(POLL_S)


def step_metrics(path: Path, step: int, *, start: int = 0) -> dict[str, float]:
    """Return what the trainer's file monitor has written about a step so far, by name. Later lines count; those before
    byte `start` do not."""
    found: dict[str, float] = {}
    if path.exists():
        for line in path.read_bytes()[start:].splitlines():
            if line.endswith(b"}") and (row := json.loads(line)).get("step") == step:
                found |= row
    return found


class Steps:
    """The steps of one prime-rl trainer, by the files of its output folder."""

    def __init__(self, output: Path, *, ranks: int, timeout_s: float = 3600.0) -> None:
        """Forgets the weights that an earlier trainer wrote at its start. So the trainer must start after this."""
        self.output, self.ranks, self.timeout_s = output, ranks, timeout_s
        folders = (output / "checkpoints").glob("step_*")
        self.held = max((int(each.name.removeprefix("step_")) for each in folders), default=0)
        """Step of the newest checkpoint, behind which the trainer goes on; 0 without one."""
        self.metrics, self.unread = output / "metrics.jsonl", 0
        """What the file monitor writes, and its size when the last step was sent."""
        self.forget_weights(self.held)

    def cursor_file(self, step: int) -> Path:
        """Return the file that holds turnlog's cursor behind `step`, beside the trainer's checkpoints."""
        return self.output / "turnlog" / f"step_{step}.json"

    def reported(self) -> tuple[int, dict[str, Any] | None]:
        """Return the last step that turnlog knows of those in the newest checkpoint, and the cursor behind it."""
        for step in range(self.held, 0, -1):
            if (file := self.cursor_file(step)).exists():
                return step, json.loads(file.read_text())
        return 0, None

    def keep(self, step: int, cursor: dict[str, Any]) -> None:
        """Write the cursor behind `step`, whole or not at all."""
        file = self.cursor_file(step)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(cursor))
        part.rename(file)

    def weights(self, step: int) -> Path:
        """Return the folder with the weights after `step` once they are complete. Raises TimeoutError."""
        folder = self.output / "broadcasts" / f"step_{step}"
        wait_until((folder / "STABLE").exists, f"{folder}/STABLE", self.timeout_s)
        return folder

    def forget_weights(self, step: int) -> None:
        """Have `weights` wait until the trainer writes those of `step` again."""
        (self.output / "broadcasts" / f"step_{step}" / "STABLE").unlink(missing_ok=True)

    def send(self, step: int, grid: list[list[MicroBatch]]) -> None:
        """Write the micro batches of a step, and forget what an earlier trainer wrote about it."""
        self.forget_weights(step)
        self.unread = self.metrics.stat().st_size if self.metrics.exists() else 0
        asyncio.run(FileSystemMicroBatchSender(self.output, self.ranks, step).send(grid))

    def report(self, step: int, grid: list[list[MicroBatch]], *, over: bool = False) -> dict[str, Any]:
        """Return the fields of StepCompleted that prime-rl measures. Raises TimeoutError.

        prime-rl reports the mean loss over micro batches, each of which is divided by N of the whole step. The loss of
        the step is their sum. `over`: the trainer that took the step has ended, so what it did not write is NaN.
        """
        measured = functools.partial(step_metrics, self.metrics, step, start=0 if over else self.unread)
        if not over:
            wanted = {"loss/mean", "optim/lr"}
            wait_until(lambda: wanted <= measured().keys(), f"{self.metrics} of step {step}", self.timeout_s)
        found = {"loss/mean": math.nan, "optim/lr": math.nan} | measured()
        kept = ("mismatch_kl/all/mean", "mismatch_kl/all/max", "entropy/all/mean", "is_masked/mean")
        return {
            "loss": found["loss/mean"] * sum(map(len, grid)),
            "grad_norm": found.get("optim/grad_norm", math.nan),
            "learning_rate": found["optim/lr"],
            "entropy": found.get("entropy/all/mean"),
            "seconds": {"step": found.get("time/forward_backward", 0.0)},
            "metrics": {f"prime_rl/{name}": found[name] for name in kept if name in found},
        }


def train(trainer: Any, steps: Steps, *, step: int, seq_len: int) -> None:
    """Have prime-rl train every batch of `trainer` (turnlog.client). `step`: number of steps before the first batch.

    A step that prime-rl's checkpoint holds and turnlog does not know is reported, and not taken again.
    """
    held = steps.held
    if trainer.publication_is_due:
        trainer.publish(steps.weights(held))  # the trainer writes the weights that it starts from
    for batch in trainer:
        step += 1
        grid = micro_batches(batch.rows, seq_len=seq_len, ranks=steps.ranks)
        if step > held:
            steps.send(step, grid)
        folder = steps.weights(max(step, held))
        steps.keep(step, trainer.step_completed(batch, **steps.report(step, grid, over=step <= held)))
        if trainer.publication_is_due:
            trainer.publish(folder)


def main() -> None:
    import turnlog.client

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="directory of the turnlog run")
    parser.add_argument("output", type=Path, help="output_dir of prime-rl's trainer")
    parser.add_argument("--seq-len", type=int, default=4096, help="model.seq_len of the trainer")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of the trainer")
    asked = parser.parse_args()
    steps = Steps(asked.output, ranks=asked.ranks)
    step, cursor = steps.reported()
    print(f"start prime-rl's trainer now: the next step is {steps.held + 1}", flush=True)
    with turnlog.client.connect(asked.run).trainer(cursor=cursor) as trainer:
        train(trainer, steps, step=step, seq_len=asked.seq_len)


if __name__ == "__main__":
    main()
