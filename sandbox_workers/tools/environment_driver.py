"""Driver that env_step runs in the sandbox's persistent interpreter: one environment with Gymnasium's reset and step.

This text is sent into the sandbox and becomes the module `turnlog_environment` there, so it is standard library only
and imports nothing of turnlog. API: https://gymnasium.farama.org/api/env/ (neither that package nor numpy is
required)."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
import traceback
from typing import Any

LONGEST_REPR = 200


class EnvironmentRefusal(Exception):
    """An error whose text the model reads verbatim."""


class Stage:
    """The one environment of this interpreter."""

    def __init__(self) -> None:
        self.name = ""
        self.environment: Any = None
        self.over = ""
        """Reason why no step can be taken; empty while an episode runs."""

    def reset(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode, in a new environment if another one is named."""
        if not (name or self.name):
            raise EnvironmentRefusal(
                'no environment stands here yet: the first reset names one, "environment": "module:NAME"'
            )
        if self.environment is None or (name and name != self.name):
            close = getattr(self.environment, "close", None)
            self.environment, self.over = None, "no episode has begun: reset first"
            if close is not None:
                close()
            self.environment, self.name = create_environment(name or self.name), name or self.name
        given = {key: arguments[key] for key in ("seed", "options") if key in arguments}
        self.over = "the last reset failed: reset again"
        result = self.environment.reset(**given)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise EnvironmentRefusal(
                f"reset of {self.name} must answer (observation, info), got {type(result).__name__}"
            )
        self.over = ""
        return {"observation": result[0], "reward": 0.0, "terminated": False, "truncated": False, "info": result[1]}

    def step(self, name: str, action: Any) -> dict[str, Any]:
        """Take one action."""
        if self.environment is None:
            raise EnvironmentRefusal(
                "no environment stands here: reset first. (One that stood here went with its interpreter, which a call "
                "ends by meeting a limit.)"
            )
        if name and name != self.name:
            raise EnvironmentRefusal(f"the environment here is {self.name}; reset to change to {name}")
        if self.over:
            raise EnvironmentRefusal(self.over)
        convert = getattr(getattr(self.environment, "action_space", None), "from_jsonable", None)
        result = self.environment.step(convert([action])[0] if convert is not None else action)
        if not (isinstance(result, tuple) and len(result) == 5):
            raise EnvironmentRefusal(
                f"step of {self.name} must answer (observation, reward, terminated, truncated, info), got "
                f"{type(result).__name__}"
            )
        answer = dict(zip(("observation", "reward", "terminated", "truncated", "info"), result, strict=True))
        answer["terminated"], answer["truncated"] = bool(answer["terminated"]), bool(answer["truncated"])
        if answer["terminated"] or answer["truncated"]:
            how = "terminated" if answer["terminated"] else "was truncated"
            self.over = f"the episode {how}: reset before the next action"
        return answer


def create_environment(name: str) -> Any:
    """Create the environment by calling its class or factory."""
    module, _, attribute = name.partition(":")
    for folder in (os.environ.get("HOME", ""), os.getcwd()):  # the workspace, and the interpreter's current folder
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    importlib.invalidate_caches()  # its file may be newer than the interpreter
    factory: Any = importlib.import_module(module)
    for part in attribute.split("."):
        factory = getattr(factory, part)
    environment = factory()
    if not (callable(getattr(environment, "reset", None)) and callable(getattr(environment, "step", None))):
        raise EnvironmentRefusal(f"{name} makes no environment: it needs reset and step")
    return environment


def as_json(value: Any) -> Any:
    """Convert an environment's answer to JSON values: numpy values, tuples, sets, bytes. A number that JSON lacks
    becomes its name, as in the JSON mapping of protocol buffers; anything else becomes its repr, cut."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"inf": "Infinity", "-inf": "-Infinity"}.get(str(value), "NaN")
    if isinstance(value, dict):
        return {str(as_json(key)): as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    if isinstance(value, set | frozenset):
        return [as_json(part) for part in sorted(value, key=repr)]
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("latin-1")
    if hasattr(value, "tolist"):
        return as_json(value.tolist())
    return repr(value)[:LONGEST_REPR]


def answer(text: str, stage: Stage) -> None:
    """Print one line: {"answer": ...} or {"error": ...}. What the environment itself prints goes to stderr."""
    arguments = json.loads(text)
    name = arguments.get("environment", "")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            done = stage.reset(name, arguments) if arguments.get("reset") else stage.step(name, arguments["action"])
            said = json.dumps({"answer": as_json(done)}, ensure_ascii=False, allow_nan=False)
    except EnvironmentRefusal as refusal:
        said = json.dumps({"error": str(refusal)})
    except (Exception, SystemExit) as error:  # the environment's code failed: answer its traceback; the episode stays
        shown = traceback.format_exception(error.with_traceback(_below(error)))
        said = json.dumps({"error": "".join(shown)})
    sys.stdout.write(f"\n{said}\n")
    sys.stdout.flush()


def _below(error: BaseException) -> Any:
    """Return the part of a traceback that belongs to the environment."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_globals.get("__name__") == __name__:
        place = place.tb_next
    return place


STAGE = Stage()
