"""Upstream's own client: `python upstream_client.py URL < episodes.json`, in upstream's environment.

Reads a list of {"reset": {...}, "actions": [{...}]}, and prints for each the list of answers."""

import json
import sys

from openenv.core.generic_client import GenericEnvClient


def answer(result) -> dict:
    """What the client made of an answer."""
    metadata = dict(result.metadata or {})
    return {
        "observation": result.observation, "reward": result.reward or 0.0, "done": result.done, "metadata": metadata
    }  # fmt: skip


played = []
with GenericEnvClient(base_url=sys.argv[1]).sync() as client:
    for episode in json.load(sys.stdin):
        answers = [answer(client.reset(**episode["reset"]))]
        for action in episode["actions"]:
            if answers[-1]["done"]:
                break
            answers.append(answer(client.step(action)))
        played.append(answers)
json.dump(played, sys.stdout)
