"""Entry point of the plugin (sglang.srt.plugins, SGLang's own mechanism): SGLang calls `register` in each of its
processes.

The plugin replaces two methods of the scheduler's weight updater, and does so only for requests of turnlog. If SGLang
lacks these methods, nothing is changed, and the engine gets weights through the store. Nothing else of turnlog is
imported before the first such request.

With --sleep-on-idle, the plugin also lets a paused engine sleep until its next request. SGLang's own loop spins while
it is paused, and takes a core from those that send weights or, with [engine] colocate, from the training step.

Source: sglang 0.5.21 `plugins/hook_registry.py`.
"""

from __future__ import annotations

import logging
import pkgutil
from typing import Any

from turnlog.infra.engine_plugin.order import ACTION, FORMAT

log = logging.getLogger(__name__)
REGISTRY = "sglang.srt.plugins.hook_registry"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
NEEDED = ("update_weights_from_distributed", "check_weights", "_select_runners", "flush_cache_after_weight_update")
"""Methods that must exist; the first two are hooked."""
SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
PAUSED, SLEEP = "_record_scheduler_state_for_paused_engine", "maybe_sleep_on_idle"
"""Method that the loop of a paused engine calls each time, which is hooked, and the one by which an idle engine
sleeps."""


def register() -> None:
    """Hook both methods; do nothing if SGLang lacks one."""
    try:
        registry = pkgutil.resolve_name(REGISTRY)
        manager = pkgutil.resolve_name(MANAGER)
        absent = [name for name in NEEDED if not hasattr(manager, name)]
    except (ImportError, AttributeError) as error:
        absent = [str(error)]
    if absent:
        log.warning("this engine cannot receive weights from training ranks: SGLang lacks %s", ", ".join(absent))
        return
    for name, hook in zip(NEEDED, (_update_weights, _check_weights), strict=False):
        target = f"{MANAGER.replace(':', '.')}.{name}"
        registry.HookRegistry.register(target, hook, registry.HookType.AROUND)
    scheduler = pkgutil.resolve_name(SCHEDULER)
    if hasattr(scheduler, PAUSED) and hasattr(scheduler, SLEEP):
        target = f"{SCHEDULER.replace(':', '.')}.{PAUSED}"
        registry.HookRegistry.register(target, _sleep_while_paused, registry.HookType.AROUND)


def _sleep_while_paused(original: Any, scheduler: Any) -> None:
    original(scheduler)
    scheduler.maybe_sleep_on_idle()


def _update_weights(original: Any, manager: Any, request: Any) -> Any:
    if not (request.load_format or "").startswith(FORMAT):
        return original(manager, request)
    from turnlog.infra.engine_plugin.receiving import update_weights

    return update_weights(manager, request)


def _check_weights(original: Any, manager: Any, request: Any) -> Any:
    if request.action != ACTION:
        return original(manager, request)
    from turnlog.infra.engine_plugin.receiving import check_weights

    return check_weights(manager)
