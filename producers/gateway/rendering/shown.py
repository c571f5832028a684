"""The parts of a conversation that a model's chat template writes, found by rendering probes: what it drops, which
format reads its calls, and which messages are appended to a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from turnlog.producers.gateway.parsers.formats import FORMATS
from turnlog.producers.gateway.parsers.parser import Call, CallFormat, Marks, Parser
from turnlog.producers.gateway.prompts import PARAMETERS, SENTINEL, TOOLS, Prompts, probe_calls

ANSWER = {"role": "assistant", "content": ""}
IN_PYTHON_OR_JSON = re.compile(r"""["']type["']: ["']image["']""")
"""Matches a content block that a template wrote verbatim, instead of as an image."""
TEXT = "Zq8"
"""Probe text; its presence in a render shows that the template writes a part."""


class Shown(NamedTuple):
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

    def written(self) -> dict[str, bool | None]:
        """Return whether the template writes each part."""
        told = self._asdict()
        return {what: written for what, written in told.items() if what not in ("plain", "answer", "sample")}

    def reads(self, calls: CallFormat | None) -> bool:
        """Return whether a format reads the call in `answer`."""
        parser = Parser(calls, tools=TOOLS)
        parser.push(self.answer)
        parser.end()
        return Call("f", f'{{"a":"{SENTINEL}"}}') in parser.parts


def shown(prompts: Prompts) -> Shown:
    """Probe the template of these prompts."""
    asked = {"role": "user", "content": "u"}
    call = ANSWER | {"tool_calls": probe_calls(1)}
    result = {"role": "tool", "content": TEXT, "tool_call_id": "call00000", "name": "f"}
    described = [{"type": "function", "function": {"name": "f", "description": TEXT, "parameters": PARAMETERS}}]

    def attempted(*messages: dict[str, Any], tools: Any = None) -> str | None:
        return prompts.attempted([*messages], tools)

    def among(*texts: str | None) -> bool | None:
        """Return whether the probe text is in one of the renders; None if all were refused."""
        said = [TEXT in text for text in texts if text is not None]
        return any(said) if said else None

    plain, offered, before = attempted(asked), attempted(asked, tools=described), attempted(asked, tools=TOOLS) or ""
    said, unsaid = attempted(asked, call, tools=TOOLS), attempted(asked, ANSWER, tools=TOOLS)
    seen = [
        attempted(asked | {"content": [*image, {"type": "text", "text": "u"}]}) for image in ([{"type": "image"}], [])
    ]
    thought, again = {"reasoning_content": TEXT}, {"role": "tool", "content": "r", "tool_call_id": "call00000"}
    thinking = [
        attempted(asked, call | thought, again, tools=TOOLS),
        attempted(asked, ANSWER | {"content": SENTINEL} | thought),
    ]
    return Shown(
        plain=None if plain is None and before == "" else True,
        system=among(*(attempted({"role": "system", "content": TEXT}, asked, tools=tools) for tools in (None, TOOLS))),
        names=among(attempted(asked | {"name": TEXT})),
        images=None if seen[0] is None else seen[0] != seen[1] and not IN_PYTHON_OR_JSON.search(seen[0]),
        reasoning=among(*thinking),
        tools=None if offered is None else TEXT in offered,
        calls=None if said is None else said != unsaid,
        results=among(attempted(asked, call, result, tools=TOOLS)),
        sample="\n".join(text for text in (said, *thinking) if text),
        answer=prompts.without_end((said or "").removeprefix(before)) if SENTINEL in (said or "") else "",
    )


class Findings(NamedTuple):
    """All that a gateway derives from its template."""

    shown: Shown
    format: str
    """Name of the format that reads calls; empty if none does."""
    reasoning: Marks | None
    appended: dict[str, bool]
    """Whether the template appends messages after an answer or writes all anew, by the kind of messages."""
    doubts: tuple[str, ...]
    """Faults that cause no error now: silent losses, and requests that will be refused."""

    def facts(self) -> dict[str, object]:
        """Return the findings as /state shows them."""
        return {
            "writes": [what for what, written in self.shown.written().items() if written],
            "drops": [what for what, written in self.shown.written().items() if written is False],
            "refuses": [what for what, written in self.shown.written().items() if written is None],
            "tool_calls": self.format,
            "reasoning": self.reasoning.opening if self.reasoning else "",
            "appended": [kind for kind, appended in self.appended.items() if appended],
            "rendered_anew": [kind for kind, appended in self.appended.items() if not appended],
        }


def findings(prompts: Prompts, written: Shown, calls: CallFormat | None, thinking: Marks | None) -> Findings:
    """Collect the findings on a template and on the formats that were chosen for it."""
    name = next((name for name, one in FORMATS.items() if one is calls), "")
    return Findings(written, name, thinking, prompts.appended(), tuple(_doubts(prompts, written, name)))


MEANS = {
    "system": "the model never sees what a system message says",
    "tools": "the model never sees what requests have of them",
    "calls": "a prompt that is written anew would lack them, and is refused",
    "results": "the model would never see them, and requests that have some are refused",
}
"""Consequences if a template drops something that agents usually send."""


def _doubts(prompts: Prompts, written: Shown, name: str) -> Iterator[str]:
    for what, means in MEANS.items():
        if written.written()[what] is False:
            yield f"the chat template does not write {what}: {means}"
    refused = [what for what in ("tools", "calls", "results") if written.written()[what] is None]
    if refused:
        yield f"the chat template refuses conversations with {', '.join(refused)}: so are the requests that have them"
    if written.answer and not name:
        yield (
            f"no known format reads the calls that the chat template writes, {written.answer[:200]!r}: they stay text, "
            "and what trains may offer no tools ([gateway] tool_calls)"
        )
    elif written.answer and not written.reads(FORMATS[name]):
        yield (
            f"the format {name} does not read the calls as the chat template writes them, {written.answer[:200]!r}: "
            "[gateway] tool_calls names another"
        )
    end = prompts.end_of_turn
    if end is not None and prompts.tokens.eos and end not in prompts.tokens.eos:
        yield (
            f"answers end at what generation_config.json and config.json name, and {prompts.end_mark}, by which the "
            "chat template ends messages, is not among it: name it there if it ends answers, too"
        )
