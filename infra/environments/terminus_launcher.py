"""Program that runs Terminus-2 of Harbor in the sandbox that it works in, instead of beside one.

It is sent as the argument of `python3 -c` to an image that has harbor (0.25 or newer), Python 3.12 or newer and tmux.
Arguments: model name of LiteLLM, base URL, tokens of the context window, the instruction. Source: the interfaces of
harbor 0.26 that Terminus-2 uses (`BaseEnvironment.exec`, `is_dir`, `upload_file`)."""

import asyncio
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

LOGS = Path("/tmp/terminus-2")


class LocalEnvironment:
    """The place where this program runs, in the form in which Harbor's agents see an environment."""

    default_user = None
    session_id = "turnlog"

    def __init__(self) -> None:
        self.trial_paths = types.SimpleNamespace(agent_dir=LOGS)

    async def exec(
        self, command: str, cwd: "str | None" = None, env: "dict[str, str] | None" = None,
        timeout_sec: "int | None" = None, user: Any = None,
    ) -> Any:  # fmt: skip
        """Run a shell command as this user, whoever is asked for."""
        from harbor.environments.base import ExecResult  # type: ignore[import-not-found]

        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, cwd=cwd, env={**os.environ, **(env or {})}, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(timeout_sec):
                output, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            raise
        return ExecResult(stdout=output.decode(), stderr=errors.decode(), return_code=process.returncode or 0)

    async def is_dir(self, path: str, user: Any = None) -> bool:
        """Return whether a folder exists."""
        return await asyncio.to_thread(os.path.isdir, path)

    async def upload_file(self, source_path: Any, target_path: str) -> None:
        """Copy a file."""
        await asyncio.to_thread(shutil.copyfile, source_path, target_path)


async def main(model: str, base_url: str, context: str, instruction: str) -> None:
    """Run the agent until it ends."""
    from harbor.agents.terminus_2.terminus_2 import Terminus2  # type: ignore[import-not-found]
    from harbor.models.agent.context import AgentContext  # type: ignore[import-not-found]

    await asyncio.to_thread(os.makedirs, LOGS, exist_ok=True)
    limits = {"max_input_tokens": int(context), "max_output_tokens": int(context) // 4}
    agent = Terminus2(
        LOGS, model, api_base=base_url, record_terminal_session=False,
        model_info={**limits, "input_cost_per_token": 0.0, "output_cost_per_token": 0.0},
    )  # fmt: skip
    environment: Any = LocalEnvironment()
    await agent.setup(environment)
    await agent.run(instruction, environment, AgentContext())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
