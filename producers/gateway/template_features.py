"""The parts of a conversation that a model's chat template writes, found by rendering probes: what it drops, which
format reads its calls, and which messages are appended to a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from turnlog.producers.gateway.message_forms import PARAMETERS, SENTINEL, TOOLS, probe_calls
from turnlog.producers.gateway.parsers.formats import FORMATS
from turnlog.producers.gateway.parsers.parser import CallFormat, Delimiters, OutputParser, ParsedCall
from turnlog.producers.gateway.prompts import Prompts

ANSWER = {"role": "assistant", "content": ""}
IN_PYTHON_OR_JSON = re.compile(r"""["']type["']: ["']image["']""")
"""Matches a content block that a template wrote verbatim, instead of as an image."""
TEXT = "Zq8"
"""Probe text; its presence in a render shows that the template writes a part."""


class TemplateFeatures(NamedTuple):
    """Parts of a conversation that a template writes. None: it refuses every conversation that has that part."""

    plain: bool | None
    """A conversation without any of the following parts."""
    system: bool | None
    """A leading system message."""
    names: bool | None
    """Names of speakers."""
    images: bool | None
    reasoning: bool | None
    """Reasoning before a call."""
    tools: bool | None
    """The offered tools."""
    calls: bool | None
    results: bool | None
    answer: str
    """An answer that is one call of f, {"a": SENTINEL}, as the template writes it; empty if it does not."""
    sample: str
    """A conversation with as many of these parts as the template accepts."""

    def written_parts(self) -> dict[str, bool | None]:
        """Return whether the template writes each part."""
        told = self._asdict()
        return {what: written for what, written in told.items() if what not in ("plain", "answer", "sample")}

    def reads(self, calls: CallFormat | None) -> bool:
        """Return whether a format reads the call in `answer`."""
        parser = OutputParser(calls, tools=TOOLS)
        parser.push(self.answer)
        parser.end()
        return ParsedCall("f", f'{{"a":"{SENTINEL}"}}') in parser.parts


def probe_template(prompts: Prompts) -> TemplateFeatures:
    """Probe the template of these prompts."""
    asked = {"role": "user", "content": "u"}
    call = ANSWER | {"tool_calls": probe_calls(1)}
    result = {"role": "tool", "content": TEXT, "tool_call_id": "call00000", "name": "f"}
    described = [{"type": "function", "function": {"name": "f", "description": TEXT, "parameters": PARAMETERS}}]

    def render(*messages: dict[str, Any], tools: Any = None) -> str | None:
        return prompts.try_render([*messages], tools)

    def among(*texts: str | None) -> bool | None:
        """Return whether the probe text is in one of the renders; None if all were refused."""
        said = [TEXT in text for text in texts if text is not None]
        return any(said) if said else None

    plain, offered, before = render(asked), render(asked, tools=described), render(asked, tools=TOOLS) or ""
    said, unsaid = render(asked, call, tools=TOOLS), render(asked, ANSWER, tools=TOOLS)
    seen = [render(asked | {"content": [*image, {"type": "text", "text": "u"}]}) for image in ([{"type": "image"}], [])]
    thought, again = {"reasoning_content": TEXT}, {"role": "tool", "content": "r", "tool_call_id": "call00000"}
    thinking = [
        render(asked, call | thought, again, tools=TOOLS),
        render(asked, ANSWER | {"content": SENTINEL} | thought),
    ]
    return TemplateFeatures(
        plain=None if plain is None and before == "" else True,
        system=among(*(render({"role": "system", "content": TEXT}, asked, tools=tools) for tools in (None, TOOLS))),
        names=among(render(asked | {"name": TEXT})),
        images=None if seen[0] is None else seen[0] != seen[1] and not IN_PYTHON_OR_JSON.search(seen[0]),
        reasoning=among(*thinking),
        tools=None if offered is None else TEXT in offered,
        calls=None if said is None else said != unsaid,
        results=among(render(asked, call, result, tools=TOOLS)),
        sample="\n".join(text for text in (said, *thinking) if text),
        answer=prompts.without_end((said or "").removeprefix(before)) if SENTINEL in (said or "") else "",
    )


class Findings(NamedTuple):
    """All that a gateway derives from its template."""

    shown: TemplateFeatures
    format: str
    """Name of the format that reads calls; empty if none does."""
    reasoning: Delimiters | None
    appended: dict[str, bool]
    """Whether the template appends messages after an answer or writes all anew, by the kind of messages."""
    doubts: tuple[str, ...]
    """Faults that cause no error now: silent losses, and requests that will be refused."""

    def facts(self) -> dict[str, object]:
        """Return the findings as /state shows them."""
        return {
            "writes": [what for what, written in self.shown.written_parts().items() if written],
            "drops": [what for what, written in self.shown.written_parts().items() if written is False],
            "refuses": [what for what, written in self.shown.written_parts().items() if written is None],
            "tool_calls": self.format,
            "reasoning": self.reasoning.opening if self.reasoning else "",
            "appended": [kind for kind, appended in self.appended.items() if appended],
            "rendered_anew": [kind for kind, appended in self.appended.items() if not appended],
        }


def findings(
    prompts: Prompts, written: TemplateFeatures, calls: CallFormat | None, thinking: Delimiters | None
) -> Findings:
    """Collect the findings on a template and on the formats that were chosen for it."""
    name = next((name for name, one in FORMATS.items() if one is calls), "")
    return Findings(written, name, thinking, prompts.check_appends(), tuple(_doubts(prompts, written, name)))


MEANS = {
    "system": "the model never sees what a system message says",
    "tools": "the model never sees those of requests",
    "calls": "a prompt that must be rendered again would lack them, and is refused",
    "results": "the model would never see them, so requests that contain some are refused",
}
"""Consequences if a template drops something that agents usually send."""


def _doubts(prompts: Prompts, written: TemplateFeatures, name: str) -> Iterator[str]:
    for what, means in MEANS.items():
        if written.written_parts()[what] is False:
            yield f"the chat template does not write {what}: {means}"
    refused = [what for what in ("tools", "calls", "results") if written.written_parts()[what] is None]
    if refused:
        yield f"the chat template refuses conversations with {', '.join(refused)}: such requests are refused"
    if written.answer and not name:
        yield (
            f"no known format reads the calls that the chat template writes, {written.answer[:200]!r}: they stay text, "
            "and sessions that train may offer no tools ([gateway] tool_calls)"
        )
    elif written.answer and not written.reads(FORMATS[name]):
        yield (
            f"the format {name} does not read the calls as the chat template writes them, {written.answer[:200]!r}: "
            "name another in [gateway] tool_calls"
        )
    if prompts.end_mark and not prompts.ends_are_named:
        yield (
            f"answers end at the tokens named by generation_config.json and config.json, but {prompts.end_mark}, with "
            "which the chat template ends messages, is not one of them: add it there if it also ends answers"
        )
