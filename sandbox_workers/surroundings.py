"""One hash for all that a call runs in: equal for equal surroundings, whatever worker and whatever sandbox it was."""

from __future__ import annotations

from collections import OrderedDict

from turnlog.sandbox_settings import EgressSettings
from turnlog.sandbox_workers.protocol import Provider, Shape
from turnlog.schemas.events import SandboxSpec
from turnlog.schemas.ids import environment_digest

KEPT = 1024


class Surroundings:
    """Asks a backend once per image and network."""

    def __init__(self, egress: EgressSettings) -> None:
        self._rules = {"allow": list(egress.allow), "mode": egress.mode, "tls": egress.tls, "cache": egress.cache}
        self._known: OrderedDict[tuple[str | tuple[str, ...] | None, ...], str] = OrderedDict()

    async def sha256(self, provider: Provider, shape: Shape, spec: SandboxSpec) -> str:
        """Hex sha256. Raises ImageMissing."""
        name = provider.name, shape.image, shape.network, spec.allow
        if name in self._known:
            self._known.move_to_end(name)
            return self._known[name]
        about: dict[str, object] = {"backend": provider.name, "network": shape.network}
        about["made_of"] = dict(await provider.environment(shape))
        if shape.network == "allowlist":
            about["rules"] = {**self._rules, "of_the_task": list(spec.allow)}
        found = self._known[name] = environment_digest(about)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return found
