"""Plugin of vLLM (entry point vllm.general_plugins, vLLM's own mechanism): every piece of a streamed output names the
weights of all tokens so far.

vLLM counts these spans anyway, and names them in the last piece. If its class is another than the one known here,
nothing is changed, and turnlog holds streamed pieces back (vllm.py). Nothing else of turnlog is imported.

Source: vllm 0.32.0 `v1/engine/output_processor.py`.
"""

from __future__ import annotations

import logging
import pkgutil
from typing import Any

log = logging.getLogger(__name__)
STATE = "vllm.v1.engine.output_processor:RequestState"
MAKES, SPANS = "_new_completion_output", "_weight_version_spans"
"""The method that makes a piece of output, and the one that counts the spans."""
MARK = "turnlog_names_spans"


def register() -> None:
    """Let each piece have its spans; do nothing if vLLM lacks the methods. vLLM calls this in each of its processes,
    and may do so several times."""
    try:
        state = pkgutil.resolve_name(STATE)
        makes, spans = getattr(state, MAKES), getattr(state, SPANS)
    except (ImportError, AttributeError) as error:
        log.warning("streamed pieces of this engine are held back until their weights are known: %s", error)
        return
    if getattr(makes, MARK, False):
        return

    def name_spans(self: Any, *given: Any, **named: Any) -> Any:
        output = makes(self, *given, **named)
        if output.weight_versions is None:
            output.weight_versions = spans(self)
        return output

    setattr(name_spans, MARK, True)
    setattr(state, MAKES, name_spans)
