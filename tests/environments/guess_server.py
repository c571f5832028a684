"""An OpenEnv server on upstream's classes: a number from 0 to 99 is to be guessed, and actions that do harm.

It runs in upstream's environment, where turnlog is not installed: `python guess_server.py PORT [SESSIONS]`. Without a
port, it ends after its imports."""

import os
import random
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class Guess(Action):
    """A guess. The other fields are for tests of what goes wrong."""

    number: int = Field(default=0, ge=0, le=99, description="The guess.")
    harm: str = Field(default="", description="raise, exit, sleep:SECONDS or print.")


class Hint(Observation):
    """What the guesser learns."""

    hint: str
    guesses: int = 0
    text: str = ""


class Guessing(Environment[Guess, Hint, State]):
    """At most eight guesses; the closer, the more reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.most, self._state = 0, 8, State()

    def reset(self, seed=None, episode_id=None, most=8, long=0, harm="", **options) -> Hint:
        self._state = State(episode_id=episode_id, step_count=0)
        if harm:
            self._do_harm(harm)
        self.number, self.most = random.Random(seed).randrange(100), most
        return Hint(hint="Guess a number from 0 to 99.", text="x" * long)

    def step(self, action: Guess, timeout_s=None, **options) -> Hint:
        self._do_harm(action.harm)
        self._state.step_count += 1
        found, last = action.number == self.number, self._state.step_count >= self.most
        hint = "right" if found else "higher" if action.number < self.number else "lower"
        metadata = {"success": found} if found or last else {}
        if last and not found:
            metadata["truncated"] = True
        reward = 1.0 if found else -abs(action.number - self.number) / 1000
        return Hint(hint=hint, guesses=self._state.step_count, reward=reward, done=found or last, metadata=metadata)

    def _do_harm(self, harm: str) -> None:
        if harm == "raise":
            raise RuntimeError("the game broke")
        if harm == "exit":
            os._exit(3)
        if harm.startswith("sleep:"):
            time.sleep(float(harm.partition(":")[2]))
        if harm == "print":
            print("a line of the server", file=sys.stderr, flush=True)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__" and len(sys.argv) > 1:
    port, sessions = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 64
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=sessions)
    uvicorn.run(app, host=os.environ.get("HOST", "127.0.0.1"), port=port, log_level="warning")
