"""An OpenEnv server on upstream's classes: every step appends its line to a file, with the episode that it belongs to.

It runs in upstream's environment, where turnlog is not installed: `python noting_server.py PORT FILE`."""

import hashlib
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

TAKES_S = 0.15
"""Of each step, behind its effect: time to be killed in."""


class Note(Action):
    """A line to append."""

    line: str = Field(default="", description="The line.")


class Notes(Observation):
    """What the notes are now."""

    checksum: str


class Noting(Environment[Note, Notes, State]):
    """The notes of an episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.lines, self._state = [], State()

    def reset(self, seed=None, episode_id=None, **options) -> Notes:
        self._state, self.lines = State(episode_id=episode_id, step_count=0), []
        return self._notes()

    def step(self, action: Note, timeout_s=None, **options) -> Notes:
        with open(sys.argv[2], "a") as effects:
            effects.write(f"{self._state.episode_id} {action.line}\n")
        self.lines.append(action.line)
        self._state.step_count += 1
        time.sleep(TAKES_S)
        return self._notes()

    def _notes(self) -> Notes:
        return Notes(checksum=hashlib.sha256(" ".join(self.lines).encode()).hexdigest()[:8], reward=0.0, done=False)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Noting, Note, Notes, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
