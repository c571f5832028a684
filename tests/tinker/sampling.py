"""Sample with the unmodified SDK: `python sampling.py URL`. For an environment of tinker.lock.

Two models are trained towards different tokens, and sampled side by side. One JSON line for each answer.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import tinker
from tinker import types

KEY = "tml-of-a-test-0123456789"
PROMPT = [7, 8, 9, 10, 11]


def told(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def imitating(token: int) -> types.Datum:
    """Return a row whose targets are one token again and again."""
    length = len(PROMPT) + 4
    tokens = (PROMPT + [token] * length)[: length + 1]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(tokens[1:], np.int64),
            "weights": np.asarray([0] * (len(PROMPT) - 1) + [1] * (length - len(PROMPT) + 1), np.float32),
        },
    )


def shown(response: types.SampleResponse) -> list[dict[str, Any]]:
    return [
        {"tokens": list(one.tokens), "logprobs": list(one.logprobs or []), "stop": one.stop_reason}
        for one in response.sequences
    ]


def main() -> None:
    """Train, save, sample."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--unembed", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    service = tinker.ServiceClient(base_url=arguments.url, api_key=KEY)
    train_and_sample(service, unembed=arguments.unembed, steps=arguments.steps)
    sample_base(service)
    service.close("success").result()


def train_and_sample(service: tinker.ServiceClient, *, unembed: bool, steps: int) -> None:
    """Train a model towards each token, then sample from all of them."""
    clients = {}
    for token in (50, 60):
        model = service.create_lora_training_client(
            base_model="turnlog-policy", rank=4, seed=token, train_unembed=unembed
        ).result()
        for _ in range(steps):
            trained = model.forward_backward([imitating(token)], "cross_entropy")
            model.optim_step(types.AdamParams(learning_rate=3e-2)).result()
        told(token=token, loss=trained.result().metrics["loss:sum"])
        scored = model.forward([imitating(token)], "cross_entropy").result()
        told(token=token, trainer=list(scored.loss_fn_outputs[0]["logprobs"].data))
        clients[token] = model.save_weights_and_get_sampling_client().result()
        path = model.save_weights_for_sampler("named").result().path
        told(token=token, path=path.rpartition("/")[2])
        sampler = service.create_sampling_client(model_path=path).result()
        row = PROMPT + [token] * 5
        told(token=token, engine=sampler.compute_logprobs(types.ModelInput.from_ints(row)).result())
    prompt = types.ModelInput.from_ints(PROMPT)
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    for token, client in clients.items():
        told(token=token, sequences=shown(client.sample(prompt, 1, greedy).result()))


def sample_base(service: tinker.ServiceClient) -> None:
    """Sample from the base model, and ask for what is refused."""
    prompt = types.ModelInput.from_ints(PROMPT)
    base = service.create_sampling_client(base_model="turnlog-policy").result()
    several = base.sample(
        prompt, 3, types.SamplingParams(max_tokens=5, temperature=1.0, stop=[383]), include_prompt_logprobs=True
    ).result()
    told(base=shown(several), prompt=several.prompt_logprobs)
    try:
        base.sample(prompt, 1, types.SamplingParams(max_tokens=5, top_p=0.5)).result()
    except tinker.APIStatusError as error:
        told(refused=str(error))


if __name__ == "__main__":
    main()
