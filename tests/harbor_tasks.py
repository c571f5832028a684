"""Small task folders in Harbor's format, as path -> text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TASK = {
    "instruction.md": "<!-- harbor-canary GUID -->\n\nMake /app/adds.py add, and say so in /app/said.\n",
    "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[agent]\ntimeout_sec = 20.0\n'
    "[environment]\nmemory_mb = 256\nstorage_mb = 32\n[verifier]\ntimeout_sec = 30.0\n",
    "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\nCOPY adds.py ./\n",
    "environment/adds.py": "def add(a, b):\n    return a - b\n",
    "tests/test.sh": "#!/bin/bash\ncd /app\nif [ -e broken ]; then exit 1; fi\n"
    "if python3 /tests/test_adds.py; then said=1; else said=0; fi\necho $said >/logs/verifier/reward.txt\n",
    "tests/test_adds.py": "import sys\nsys.path.insert(0, '/app')\nimport adds\nassert adds.add(3, 5) == 8\n",
    "solution/solve.sh": "#!/bin/bash\nsed -i s/-/+/ /app/adds.py\n",
}  # fmt: skip
"""One step, judged in the agent's environment."""
STEPS = {
    "task.toml": 'schema_version = "1.4"\n[environment]\nmemory_mb = 256\nstorage_mb = 32\n'
    '[[steps]]\nname = "one"\nmin_reward = 1.0\n'
    "[steps.agent]\ntimeout_sec = 20.0\n[steps.verifier]\ntimeout_sec = 20.0\n"
    '[[steps]]\nname = "two"\n[steps.agent]\ntimeout_sec = 20.0\n[steps.verifier]\ntimeout_sec = 20.0\n',
    "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\n",
    "tests/helper.sh": "reward() { echo $1 >/logs/verifier/reward.txt; }\n",
    "steps/one/instruction.md": "Write one.\n",
    "steps/one/tests/test.sh": "#!/bin/bash\n. /tests/helper.sh\nif [ -e one ]; then reward 1; else reward 0; fi\n",
    "steps/one/solution/solve.sh": "#!/bin/bash\necho 1 >/app/one\n",
    "steps/two/instruction.md": "Write two.\n",
    "steps/two/workdir/setup.sh": "#!/bin/bash\necho 2 >given\n",
    "steps/two/tests/test.sh": "#!/bin/bash\n"
    'if [ "$(cat two)" = 2 ]; then echo \'{"reward": 0.5, "extra": 3}\' >/logs/verifier/reward.json; fi\n',
    "steps/two/solution/solve.sh": "#!/bin/bash\ncat given >two\n",
}  # fmt: skip
"""Two steps, of which the first has to succeed."""


def write_task(folder: Path, files: Mapping[str, str]) -> Path:
    """Write a task folder."""
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder
