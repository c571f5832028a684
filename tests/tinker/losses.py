"""Train models with the unmodified SDK, and print what the server answers: `python losses.py URL [--models 2]
[--steps 5] [--first 0] [--reinforce]`. For an environment of tinker.lock.

One JSON line for each answer, with losses and log-probs as hexadecimal floats, so that two outputs are equal only if
every bit is. The rows of model N are the same whatever other models are trained beside it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import tinker
from tinker import types

ROWS, LENGTH, VOCABULARY = 3, 12, 300
KEY = "tml-of-a-test-0123456789"


def datum(rng: np.random.Generator, *, reinforce: bool) -> types.Datum:
    """Return a random row."""
    tokens = rng.integers(5, VOCABULARY, LENGTH + 1)
    inputs: dict[str, Any] = {"target_tokens": tokens[1:].astype(np.int64)}
    if reinforce:
        inputs["logprobs"] = -rng.random(LENGTH).astype(np.float32) - 4
        inputs["advantages"] = rng.standard_normal(LENGTH).astype(np.float32)
    else:
        inputs["weights"] = (rng.random(LENGTH) < 0.8).astype(np.float32)
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def told(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    """Parse and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--models", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first model")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--reinforce", action="store_true")
    parser.add_argument("--base", default="turnlog-policy")
    arguments = parser.parse_args()
    service = tinker.ServiceClient(base_url=arguments.url, api_key=KEY)
    numbers = range(arguments.first, arguments.first + arguments.models)
    clients = {
        number: service.create_lora_training_client(
            base_model=arguments.base, rank=4, seed=number, train_unembed=False
        ).result()
        for number in numbers
    }
    generators = {number: np.random.default_rng(number) for number in numbers}
    loss = "importance_sampling" if arguments.reinforce else "cross_entropy"
    for step in range(arguments.steps):
        pending = {}
        for number, client in clients.items():
            rows = [datum(generators[number], reinforce=arguments.reinforce) for _ in range(ROWS)]
            both = client.forward_backward(rows, loss), client.optim_step(types.AdamParams(learning_rate=1e-2))
            pending[number] = both
        for number, (trained, stepped) in pending.items():
            output = trained.result()
            logprobs = [float(value).hex() for row in output.loss_fn_outputs for value in row["logprobs"].data]
            metrics = {name: float(value).hex() for name, value in (stepped.result().metrics or {}).items()}
            told(model=number, step=step, loss=output.metrics["loss:sum"].hex(), logprobs=logprobs, metrics=metrics)
    for number, client in clients.items():
        told(model=number, saved=client.save_state(f"final-{number}").result().path.rpartition("/")[2])
    service.close("success").result()


if __name__ == "__main__":
    main()
