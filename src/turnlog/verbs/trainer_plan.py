"""`turnlog trainer plan`: what a rank of the trainer needs of its device's memory, and which layout to take."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnlog.names import ExitStatus
from turnlog.settings import Settings, SettingsError, TrainerSettings
from turnlog.verbs.verb import Verb, add_json

if TYPE_CHECKING:
    from rich.table import Table

    from turnlog.trainer.layouts import LayoutChoice, TrainedModels
    from turnlog.trainer.memory import RankMemory

TRAINER_EPILOG = """\
Examples:
  turnlog trainer plan --model models/Qwen3-8B --gpus 8 --gpu-memory 80
"""
PLAN_EPILOG = """\
A rank is one process of the trainer with one GPU. The model folder needs only config.json. Memory is in GB (10^9
bytes), at the peak of a step, of the rank that takes the most:

  weight, grads, optim.   weights, gradients and optimizer, counted from the model's tensors: exact
  logits                  one chunk of them, and the gradient of the output layer; 0 if the peak is elsewhere
  activ.                  activations: what the layers keep of --tokens tokens for the backward pass
  total                   the sum of these, on the GPU
  host                    memory of the machine, for an offloaded optimizer or a reference model

TP, PP, CP, EP and DP are the numbers of ranks that share tensors, layers, tokens, experts and rows, the settings
tensor_parallel, pipeline_parallel, context_parallel and expert_parallel; DP is what remains. recompute is what is
computed again in the backward pass, off whether the optimizer is offloaded to host memory (optimizer_cpu_offload).

The first line, without a time, has the layout of the settings, whether it fits or not. The others fit into 95 % of the
memory, the fastest by estimate first. time is the estimate: 1 is one rank that has room for everything. Before it
starts ranks, the trainer refuses a layout whose total exceeds the memory of its GPUs.

Examples:
  turnlog trainer plan --model models/Qwen3-8B --gpus 8 --gpu-memory 80
  turnlog trainer plan --model models/Qwen3-30B-A3B --gpus 8 --nodes 2 --tokens 32768
  turnlog trainer plan --model models/Qwen3-8B --gpus 1 --lora-rank 16
  turnlog trainer plan --settings run.toml --gpus 8             model, loss and reference of a run's settings

Exit status: 0 if a layout fits, 1 if none does, 2 if the model or an argument cannot be used.
"""
SHOWN = 8
"""Number of layouts that are shown."""
COLUMNS = (
    "TP", "PP", "CP", "EP", "DP", "recompute", "off", "weight", "grads", "optim.", "logits", "activ.", "total", "host",
    "time",
)  # fmt: skip
"""Headers of the table, which is at most 80 characters wide."""
PARTS = ("weights", "gradients", "optimizer", "logits", "activations", "total", "host")
LAYOUT = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")


def _arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = TRAINER_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    plan = actions.add_parser(
        "plan",
        help="show what a rank needs of its GPU's memory, and propose a layout",
        description="Compute what a rank of the trainer needs of its GPU's memory, and propose a layout.",
        epilog=PLAN_EPILOG,
    )
    plan.add_argument(
        "--model", type=Path, metavar="FOLDER", help="Hugging Face folder of the model (default: [model] path)"
    )
    for name, kind, metavar, default, what in (
        ("gpus", _count, "N", 8, "GPUs of each node that train (default 8)"),
        ("nodes", _count, "N", 1, "number of nodes (default 1)"),
        ("gpu-memory", _positive, "GB", 80.0, "memory of a GPU in GB, 10^9 bytes (default 80)"),
        ("tokens", _count, "N", None, "tokens of a microbatch, or of the longest row if that is longer "
         "(default: [trainer] microbatch_tokens)"),
        ("lora-rank", _rank, "N", None, "rank of low-rank adapters, 0 for none (default: [trainer] lora_rank)"),
        ("algorithm", str, "NAME", None, "algorithm; ppo trains a second model (default: [trainer] algorithm)"),
    ):  # fmt: skip
        plan.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=what)
    plan.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="data type of parameters (default: [trainer] dtype, or bfloat16 if that is auto)",
    )
    plan.add_argument(
        "--reference",
        action="store_true",
        help="keep a reference model in host memory (default: if [trainer] kl needs one)",
    )
    add_json(plan)


def _count(text: str) -> int:
    """Parse a whole number above 0. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _rank(text: str) -> int:
    """Parse a whole number. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _positive(text: str) -> float:
    """Parse a positive number. Raises ArgumentTypeError."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return found


def _trainer(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.infra.roles.terminal import Terminal, say, say_json
    from turnlog.trainer.activations import approximations
    from turnlog.trainer.families.family import read_shape
    from turnlog.trainer.layouts import GB, TrainedModels, find_layouts
    from turnlog.trainer.parameters import tensor_groups

    folder = arguments.model or Path(settings.model.path)
    if not str(folder) or (arguments.model is None and not settings.model.path):
        raise SettingsError("name a model: --model FOLDER, or [model] path in the settings")
    shape, trainer = read_shape(folder), _apply_arguments(settings.trainer, arguments)
    world, device = arguments.gpus * arguments.nodes, arguments.gpu_memory * GB
    models = TrainedModels(
        tokens=arguments.tokens or trainer.microbatch_tokens,
        critic=trainer.algorithm.partition(":")[0] == "ppo",
        reference=arguments.reference or trainer.kl != "none",
        teacher=read_shape(Path(trainer.teacher)) if trainer.teacher else None,
    )
    given = models.memory(shape, trainer, world)
    found = find_layouts(shape, trainer, models, world_size=world, node_size=arguments.gpus)
    fitting = _distinct([one for one in found if one.fits(device)])
    block = _block(fitting[0], trainer, models, world) if fitting else []
    count = sum(group.size * max(1, len(group.layers)) for group in tensor_groups(shape))
    if arguments.json:
        shown = [
            {**{name: getattr(trainer, name) for name in LAYOUT}, **one.changes, "time": round(one.slowdown, 2)}
            | {"memory": _in_gb(one.memory)}
            for one in fitting
        ]
        about = {"model": str(folder), "parameters": count, "ranks": world, "tokens": models.tokens}
        say_json(about | {"as_set": _in_gb(given), "layouts": shown, "settings": "\n".join(block)})
        return ExitStatus.DONE if fitting else ExitStatus.DIFFERS
    kind = f"adapters of rank {trainer.lora_rank}" if trainer.lora_rank else "all weights"
    say(
        f"{folder}: {shape.kind}, {count / 1e9:.2f} billion parameters, {kind} train in {trainer.dtype}",
        f"{world} GPU{'s' * (world > 1)} of {arguments.gpu_memory:g} GB, microbatches of {models.tokens:,} tokens; "
        "memory in GB",
    )
    Terminal().print(_table(fitting[:SHOWN], given, trainer, world))
    for one in approximations(shape):
        say(f"approximate: {one}")
    if not fitting:
        least = min(found, key=lambda one: one.memory.total, default=None)
        least_gb = "" if least is None else f"; the smallest needs {least.memory.total / GB:.1f} GB on each GPU"
        adapters = "" if trainer.lora_rank else ", or train adapters (--lora-rank 16)"
        say(f"no layout fits{least_gb}. Add GPUs, lower --tokens{adapters}")
        return ExitStatus.DIFFERS
    say("", *block)
    return ExitStatus.DONE


def _apply_arguments(trainer: TrainerSettings, arguments: argparse.Namespace) -> TrainerSettings:
    """Return the settings with what the command line says. A rank is assumed to have a GPU."""
    named = {
        name: value
        for name in ("lora_rank", "algorithm", "dtype")
        if (value := getattr(arguments, name)) is not None
    }  # fmt: skip
    chosen = dataclasses.replace(trainer, **named)
    return dataclasses.replace(chosen, dtype="bfloat16") if chosen.dtype == "auto" else chosen


def _distinct(found: list[LayoutChoice]) -> list[LayoutChoice]:
    """Return the fastest candidate of each way to share the model."""
    best: dict[tuple[Any, ...], LayoutChoice] = {}
    for one in found:
        best.setdefault(tuple(one.changes.get(name) for name in LAYOUT), one)
    return list(best.values())


def _in_gb(memory: RankMemory) -> dict[str, float]:
    from turnlog.trainer.layouts import GB

    return {name: round(getattr(memory, name) / GB, 1) for name in PARTS}


def _table(shown: list[LayoutChoice], given: RankMemory, trainer: TrainerSettings, world: int) -> Table:
    from rich.table import Table

    table = Table(*COLUMNS, box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    _add_row(table, trainer, given, world, "-")
    for one in shown:
        _add_row(table, dataclasses.replace(trainer, **one.changes), one.memory, world, f"{one.slowdown:.2f}")
    return table


def _add_row(table: Table, trainer: TrainerSettings, memory: RankMemory, world: int, time: str) -> None:
    ranks = [getattr(trainer, name) for name in LAYOUT]
    again = " ".join(trainer.recompute_modules) if trainer.recompute == "selective" else trainer.recompute
    offload = "yes" if trainer.optimizer_cpu_offload else "no"
    rows = world / (ranks[0] * ranks[1] * ranks[2])
    numbers = [f"{value:.1f}" for value in _in_gb(memory).values()]
    table.add_row(*map(str, ranks), f"{rows:g}", again, offload, *numbers, time)


def _block(best: LayoutChoice, trainer: TrainerSettings, models: TrainedModels, world: int) -> list[str]:
    """Return the settings of a layout as TOML."""
    from turnlog.trainer.layouts import toml

    defaults = TrainerSettings()
    chosen = dataclasses.replace(trainer, **best.changes)
    values = {"world_size": world, "dtype": chosen.dtype, "microbatch_tokens": models.tokens}
    names = (
        *LAYOUT, "sequence_parallel", "recompute", "recompute_modules", "optimizer_cpu_offload", "lora_rank",
        "algorithm", "grad_reduce_in_fp32", "use_precision_aware_optimizer",
    )  # fmt: skip
    values |= {name: getattr(chosen, name) for name in names if getattr(chosen, name) != getattr(defaults, name)}
    return ["[trainer]", *(f"{name} = {toml(value)}" for name, value in values.items())]


VERBS = (Verb("trainer", "plan the memory of the trainer's GPUs", _trainer, _arguments),)
