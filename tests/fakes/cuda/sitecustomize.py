"""torch.cuda of a machine with four devices, as far as a process that chooses its own: the choice is told, and ends it.

On PYTHONPATH, so that it stands in processes that others start, too.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

DEVICES = 4


def chosen(device: Any) -> None:
    """torch.cuda.set_device"""
    print(json.dumps({"device": int(device), "megatron": "megatron.core" in sys.modules}), flush=True)
    os._exit(0)


torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: DEVICES
torch.cuda.set_device = chosen
