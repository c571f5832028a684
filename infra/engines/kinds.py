"""The client and the control that an engine has by its kind."""

from __future__ import annotations

from collections.abc import Callable

from turnlog.infra.engines.protocol import Engine, EngineControl
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.infra.engines.vllm import VLLM, VLLMControl

Connect = Callable[[str, str], Engine]
"""Makes a client of a URL and a kind."""
WITHOUT_IMAGES = frozenset({"vllm"})
"""Kinds whose clients refuse every request with images."""


def connect_engine(url: str, kind: str, *, ca_file: str = "") -> Engine:
    """Return the client of an engine. Raises TlsFileUnusable."""
    return VLLM(url, ca_file=ca_file) if kind == "vllm" else SGLang(url, ca_file=ca_file)


def control_engine(
    url: str, kind: str, *, ca_file: str = "", update: str = "retract", adapters: bool = False
) -> EngineControl:
    """Return the control of an engine; `update` and `adapters` as in SGLangControl. Raises TlsFileUnusable."""
    if kind == "vllm":
        return VLLMControl(url, ca_file=ca_file, update=update)
    return SGLangControl(url, ca_file=ca_file, update=update, adapters=adapters)
