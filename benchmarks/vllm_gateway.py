"""T2-VLLM: what the gateway adds to a turn on vLLM engines, at the median of 32 sessions at once. It is T2 with an
engine that speaks as vLLM does: t2_gateway.py.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

if __name__ == "__main__":
    os.environ["TURNLOG_ENGINE_KIND"] = "vllm"
    runpy.run_path(str(Path(__file__).with_name("t2_gateway.py")), run_name="__main__")
