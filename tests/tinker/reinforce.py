"""Reinforce a model with the unmodified SDK: `python reinforce.py URL [--steps 10]`. For an environment of
tinker.lock.

The reward of a token is 1 if its id is even, and 0 otherwise; a model that has learned nothing gets about 0.5. Each
step samples from the newest weights and trains on the log-probs that the engine gave. One JSON line for each step.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import tinker
from tinker import types

KEY = "tml-of-a-test-0123456789"
PROMPT, TOKENS, SAMPLES = [7, 8, 9, 10, 11], 4, 24


def reward_of(tokens: list[int]) -> float:
    """Return the share of even ids."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def datum(sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Return the row of a sample; the prompt has no advantage."""
    tokens = PROMPT + list(sequence.tokens)
    unused = [0.0] * (len(PROMPT) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(tokens[1:], np.int64),
            "logprobs": np.asarray(unused + list(sequence.logprobs or []), np.float32),
            "advantages": np.asarray(unused + [advantage] * len(sequence.tokens), np.float32),
        },
    )


def main() -> None:
    """Sample, reward, train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--loss", default="ppo")
    arguments = parser.parse_args()
    service = tinker.ServiceClient(base_url=arguments.url, api_key=KEY)
    model = service.create_lora_training_client(base_model="turnlog-policy", rank=4, seed=1).result()
    prompt = types.ModelInput.from_ints(PROMPT)
    for step in range(arguments.steps):
        sampler = model.save_weights_and_get_sampling_client().result()
        sampled = sampler.sample(prompt, SAMPLES, types.SamplingParams(max_tokens=TOKENS)).result().sequences
        rewards = np.asarray([reward_of(list(one.tokens)) for one in sampled])
        advantages = (rewards - rewards.mean()).tolist()
        rows = [datum(one, advantage) for one, advantage in zip(sampled, advantages, strict=True)]
        trained = model.forward_backward(rows, arguments.loss)
        model.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        outputs = trained.result().loss_fn_outputs
        apart = [
            abs(ours - theirs)
            for output, one in zip(outputs, sampled, strict=True)
            for ours, theirs in zip(output["logprobs"].data[len(PROMPT) - 1 :], one.logprobs or [], strict=True)
        ]
        print(json.dumps({"step": step, "reward": float(rewards.mean()), "apart": float(max(apart))}), flush=True)
    service.close("success").result()


if __name__ == "__main__":
    main()
