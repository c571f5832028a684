"""SGLang's command line as far as turnlog writes it; this process becomes benchmarks/chaos/scripted_engine.py."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[4] / "benchmarks/chaos/scripted_engine.py"

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("host", "port", "model-path"):
        parser.add_argument(f"--{name}", required=True)
    asked, _ = parser.parse_known_args()
    argv = (sys.executable, str(SCRIPT), asked.port, asked.model_path, "--host", asked.host)
    os.execv(argv[0], argv)
