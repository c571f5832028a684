"""One SGLang engine as a child process: real SGLang on CPU (its own torch code), or on CUDA without the shim.

On CPU the names that SGLang imports from its CUDA kernels come from `engine_shim`, where each raises when called: what
serves is SGLang's scheduler, cache, loaders and torch-native attention.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

from turnlog.infra.embedded.errors import EngineDied, ModelMissing, NotInstalled
from turnlog.infra.embedded.ports import HOST, ONE_HOST, claim
from turnlog.infra.embedded.process import Launch, Server
from turnlog.settings import EngineSettings

SHIM = Path(__file__).resolve().parent / "engine_shim"
MODEL_FILES = ("config.json", "tokenizer.json")
REMEDY = "look at the lines below; check [model] path and [engine] device, dtype, context, max_total_tokens, extra_args"
CPU_ARGUMENTS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled"),
    *("--cuda-graph-backend-prefill", "disabled"),
    *("--grammar-backend", "none"),
    *("--mem-fraction-static", "0.3"),
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # else its idle loop takes most of a core
)
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
BEGINNING = 'rm -f "$0" && exec "$@"'
"""Its ranks meet in a file, which must be new at each start: torch's TCPStore listens on every interface, and whoever
reaches it is a rank."""
OVER_SEVERAL_HOSTS = ("--dist-init-addr", "--nnodes")


class Engine(Server):
    """An engine that serves the model folder `model`."""

    setting = "the engine's port"

    def __init__(
        self, model: Path, settings: EngineSettings, *, log: Path, port: int = 0, name: str = "engine-0", seed: int = 1
    ) -> None:
        """Port 0 picks a free one, kept for every start of this object. Raises PortTaken, ModelMissing."""
        check_model(model)
        self._model = model.resolve()
        self._settings = settings
        self._log = log
        self._seed = seed
        self.name = name
        self.port = claim(port, self.setting)

    @property
    def address(self) -> str:
        return self.url

    @property
    def url(self) -> str:
        """http://host:port"""
        return f"http://{HOST}:{self.port}"

    def launch(self) -> Launch:
        """How the engine is started. Raises NotInstalled."""
        if importlib.util.find_spec("sglang") is None:
            raise NotInstalled(
                "sglang is not installed: install the `engine` extra, or set [engine] urls to engines of your own"
            )
        on_cpu = self._settings.device == "cpu"
        environment = ENVIRONMENT | (CPU_ENVIRONMENT | {"PYTHONPATH": str(SHIM)} if on_cpu else {})
        argv = self._argv(on_cpu)
        if not any(argument.startswith(OVER_SEVERAL_HOSTS) for argument in self._settings.extra_args):
            meeting = self._log.resolve().with_suffix(".rendezvous")
            argv = ("/bin/sh", "-c", BEGINNING, str(meeting), *argv)
            environment |= ONE_HOST | {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{meeting}"}
        return Launch(
            name=self.name,
            argv=argv,
            log=self._log,
            env=environment,
            ready=self.serves,
            ready_timeout_s=self._settings.start_timeout_s,
            stop_timeout_s=3.0,  # nothing to save, and its own shutdown takes 8 s
            died=EngineDied,
            remedy=REMEDY,
        )

    def serves(self) -> bool:
        """Whether the engine names the model it serves (GET /model_info)."""
        try:
            with urllib.request.urlopen(f"{self.url}/model_info", timeout=0.5) as answer:
                return "model_path" in json.load(answer)
        except urllib.error.HTTPError as refusal:
            refusal.close()
            return False
        except (OSError, ValueError):
            return False

    def _argv(self, on_cpu: bool) -> tuple[str, ...]:
        settings = self._settings
        return (
            *(sys.executable, "-W", "ignore", "-m", "sglang.launch_server"),
            *("--host", HOST, "--port", str(self.port)),
            *("--model-path", str(self._model)),
            *("--dtype", settings.dtype),
            *("--context-length", str(settings.context)),
            *("--max-total-tokens", str(settings.max_total_tokens)),
            *("--random-seed", str(self._seed)),
            "--skip-server-warmup",
            *(CPU_ARGUMENTS if on_cpu else ()),
            *settings.extra_args,
        )


def check_model(model: Path) -> None:
    """Raises ModelMissing when the folder is not a Hugging Face model with weights and tokenizer."""
    missing = [name for name in MODEL_FILES if not (model / name).is_file()]
    if not missing and not any(model.glob("*.safetensors")):
        missing = ["*.safetensors"]
    if missing:
        raise ModelMissing(
            f"{model} holds no {', '.join(missing)}: set [model] path to a Hugging Face folder (config, tokenizer, "
            "safetensors), or leave it empty so that `turnlog run` makes the recipe's own"
        )
