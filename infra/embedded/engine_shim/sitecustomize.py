"""Makes SGLang's engine run on CPU; Python runs this file at its start, before anything else.

Only engines on CPU have this folder in PYTHONPATH. Each patch waits in the import system for the module that it
changes.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class TorchvisionOperators(importlib.abc.MetaPathFinder):
    """Declares the operators torchvision::nms and ::qnms when torchvision is imported; finds no module itself.

    torchvision declares fakes for these operators, which exist only if its compiled part loads. Beside a CPU-only torch
    it does not load, and the import would fail. Beside a CUDA build it loads even without a GPU, and a second
    declaration would abort the process."""

    library: Any = None
    """Reference to the library: the declarations last as long as it does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Declare the operators if torchvision is imported; always return None."""
        if fullname == "torchvision" and self.library is None:
            import torch

            if torch.version.cuda is None:
                library: Any = torch.library
                self.library = library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


class CpuOperators(importlib.abc.MetaPathFinder):
    """Gives torch.ops.sgl_kernel the missing names when sglang is imported, so that vision models load; finds no module
    itself.

    The Qwen-VL modules look up SGLang's CPU kernels at import, and compute with torch where the machine has none. The
    names resolve, and calling one raises."""

    given = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Replace the namespace if sglang is imported; always return None."""
        if fullname == "sglang" and not self.given:
            self.given = True
            import torch

            operators: Any = torch.ops
            operators.sgl_kernel = _wrap_namespace(type(operators.sgl_kernel))("sgl_kernel")
        return None


OPERATORS = "sgl_kernel.mamba"
"""Module with operators in torch."""
ASKED_FOR = ("fused_qk_norm_cpu", "fused_qk_norm_rope_cpu")
"""Kernels that half-precision mixtures of experts use if their names resolve, and do without if not."""


def _wrap_namespace(namespace: Any) -> Any:
    class OperatorNamespace(namespace):  # type: ignore[misc]
        """The namespace, in which a missing name that ends in _cpu is an operator of sgl_kernel.mamba, or one that
        raises, unless it is in ASKED_FOR."""

        def __getattr__(self, name: str) -> Any:
            if not name.endswith("_cpu") or name in ASKED_FOR:
                return super().__getattr__(name)
            return getattr(importlib.import_module(OPERATORS), name, None) or absent(name)

    return OperatorNamespace


def absent(name: str) -> Any:
    """Return an operator that raises NotImplementedError, since it does not exist on this machine."""

    def operator(*_: object, **__: object) -> object:
        raise NotImplementedError(f"torch.ops.sgl_kernel.{name} was called, and it has no build for this machine")

    return operator


class Mended(importlib.abc.MetaPathFinder):
    """Finds the modules in MENDED as Python would, and patches each once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec with a loader that patches it; None for all other modules."""
        if fullname not in MENDED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                MENDED[fullname](module)

            loader.exec_module = exec_module
        return spec


def with_plain_buffer(module: Any) -> None:
    """Add an allocator for "cpu", so that routed experts can be returned.

    SGLang pins their buffer through the CUDA driver on every device that has no allocator of its own. A CPU has none,
    and without a GPU there is no driver. Plain memory holds the same rows."""
    functions: Any = module.__dict__.get("ALLOC_MEMORY_FUNCS", {})  # other versions may have none
    functions.setdefault("cpu", plain)


def plain(dims: tuple[int, ...], dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any) -> Any:
    """Allocate the buffer with SGLang's own allocator, without pinning it."""
    return allocator.allocate(dims, dtype=dtype, device=device)


def without_pinning(module: Any) -> None:
    """Let the module create tensors in unpinned memory, so that adapters work: it pins batch metadata for the copy to a
    GPU, which requires the CUDA driver."""
    module.torch = Unpinned(module.torch)


def with_torch_norm(module: Any) -> None:
    """Let gated norms compute with torch: without AMX, the module would run Triton."""
    module.layernorm_fn = importlib.import_module(OPERATORS).layernorm_fn


def with_torch_gate(module: Any) -> None:
    """Let the gate of Qwen3.5's shared expert compute with torch: the module would run Triton."""
    module.fused_gate_sigmoid_mul_add = importlib.import_module(OPERATORS).fused_gate_sigmoid_mul_add


class Unpinned:
    """torch without pinned memory."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        torch.Tensor.pin_memory = lambda tensor, *_: tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def tensor(self, *arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
        """Call torch.tensor without pinning."""
        return self._torch.tensor(*arguments, **named)

    def zeros(self, *arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
        """Call torch.zeros without pinning."""
        return self._torch.zeros(*arguments, **named)


def with_latent_prompts(module: Any) -> None:
    """Let torch's attention attend to the cached vectors of latent attention in prompts, as it does in answers.

    SGLang expands keys and values of prompts for every head, and its other backends attend to those. That of torch
    reads keys and values from the cache, which holds the short vectors."""
    registry, absorbed = module.AttentionBackendRegistry, module.AttnForwardMethod.MLA
    registry.register("torch_native", lambda *_: absorbed)


def with_sinks(module: Any) -> None:
    """Let torch's attention take gpt-oss's sinks, which a layer passes beside queries, keys and values."""
    backend, plain, of_layer = module.TorchNativeAttnBackend, module.scaled_dot_product_attention, list[Any]()
    attend_with_sinks = importlib.import_module("sgl_kernel.sinks").attend_with_sinks

    def attend(*arguments: Any, **named: Any) -> Any:
        return attend_with_sinks(*arguments, sinks=of_layer[0], **named) if of_layer else plain(*arguments, **named)

    def taking_sinks(forward: Any) -> Any:
        def forward_with_sinks(*arguments: Any, sinks: Any = None, **named: Any) -> Any:
            of_layer[:] = [] if sinks is None else [sinks]
            try:
                return forward(*arguments, **named)
            finally:
                of_layer.clear()

        return forward_with_sinks

    module.scaled_dot_product_attention = attend
    backend.forward_extend, backend.forward_decode = map(taking_sinks, (backend.forward_extend, backend.forward_decode))


def with_windows(module: Any) -> None:
    """Give Mistral's layers their sliding windows, which SGLang leaves out, and add Ministral, which it lacks."""
    plain: Any = module.MistralForCausalLM

    class MistralForCausalLM(plain):  # type: ignore[misc]
        """Windows are in all layers, or in those that layer_types names."""

        def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(config, *arguments, **named)
            kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
            for layer, kind in zip(self.model.layers, kinds, strict=True):
                if config.sliding_window and kind == "sliding_attention":
                    layer.self_attn.attn.sliding_window_size = config.sliding_window - 1  # without the token itself

    class MinistralForCausalLM(MistralForCausalLM):
        """The same."""

    module.EntryClass = [
        MistralForCausalLM,
        MinistralForCausalLM,
        *(model for model in module.EntryClass if model is not plain),
    ]


def with_torch_backend(module: Any) -> None:
    """Let families whose attention needs sinks choose torch's attention, which has them (with_sinks): SGLang's list has
    Intel's alone for CPUs."""
    chosen = module.attention_backends_of
    module.attention_backends_of = lambda settings: tuple(
        "intel_amx" if backend == "torch_native" else backend for backend in chosen(settings)
    )


MENDED: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.common": with_plain_buffer,
    "sglang.srt.arg_groups.model_hook": with_torch_backend,
    "sglang.srt.layers.attention.torch_native_backend": with_sinks,
    "sglang.srt.models.mistral": with_windows,
    "sglang.srt.models.qwen2_moe": with_torch_gate,
    "sglang.srt.models.deepseek_common.attention_backend_handler": with_latent_prompts,
    "sglang.kernels.ops.attention.fla.layernorm_gated": with_torch_norm,
    "sglang.srt.lora.layers": without_pinning,
    "sglang.srt.lora.backend.torch_backend": without_pinning,
}

sys.meta_path[:0] = [Mended(), CpuOperators(), TorchvisionOperators()]
