"""Redaction in the gateway: what the engine sees, what records hold, and when the tokens of a turn are withheld.

Masking a request depends on its messages alone, in their order. A client sends its history again with every turn, so
each message gets the placeholders that it got before, an echo of an answer equals the recorded answer, and another
gateway that continues the session masks alike. Where the engine saw a text that records may not show, the ids of the
record are 0 from there on, and no turn is continued from them: the next prompt is rendered anew, here as on a gateway
that knows the records only.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from turnlog.infra.redaction.masking import count_placeholders
from turnlog.infra.redaction.redactor import Redactor, count
from turnlog.producers.gateway.conversation import Conversation
from turnlog.producers.gateway.dialects.dialect import TurnRequest
from turnlog.producers.gateway.engines import Draft
from turnlog.producers.gateway.planner import TurnPlan
from turnlog.schemas.events import TurnCompleted

WITHHELD_ID = 0
"""Id that stands for each withheld token. What a record shows is the number of tokens only."""


class RequestRedactor:
    """Masks the requests and the answers of sessions."""

    def __init__(self, redactor: Redactor, key: Callable[[], bytes]) -> None:
        """`key` returns a secret of the run's gateways."""
        self._redactor = redactor
        self._key = key

    def request(self, asked: TurnRequest, conversation: Conversation) -> TurnRequest:
        """Return a request with what is needed to record it. With `inputs` = mask its own messages are the masked ones;
        otherwise `record` is the masked request, if the two differ. May run in any thread."""
        masker = self._redactor.masker()
        raw = [
            masker.message(one) if self._masks(message.role, message.digest in conversation.answered) else one
            for one, message in zip(asked.raw, asked.messages, strict=True)
        ]
        tools = asked.tools
        if tools and self._redactor.inputs != "off":
            tools = self._redactor.masker("tools").value(tools)
        if tools is asked.tools and all(new is old for new, old in zip(raw, asked.raw, strict=True)):
            return replace(asked, masker=masker)
        # A hash of the body would let a reader of the log try out telephone numbers, and so would one without a key.
        sha256 = hmac.new(self._key(), asked.sha256.encode(), hashlib.sha256).hexdigest()
        messages = conversation.messages.read(raw)
        masked = replace(asked, raw=raw, messages=messages, tools=tools, sha256=sha256, masker=masker)
        if self._redactor.inputs == "mask":
            return masked
        return replace(asked, record=masked, sha256=sha256, masker=masker)

    def _masks(self, role: str, own: bool) -> bool:
        """Return whether messages of a role are masked. What the policy sampled itself (`own`) is an output, whoever
        sends it; other messages of assistants are what a client says they are."""
        if role != "assistant":
            return self._redactor.inputs != "off"
        return self._redactor.outputs != "off" or (self._redactor.inputs != "off" and not own)

    def response(self, asked: TurnRequest, response: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request as records may hold it; the same object if it shows nothing."""
        if asked.masker is None or self._redactor.outputs == "off":
            return response
        masked: dict[str, Any] = asked.masker.message(response)
        return masked

    def stop(self, asked: TurnRequest, stopped_by: str | None) -> str | None:
        """Return the stop sequence that ended an answer as records may hold it."""
        if stopped_by is None or asked.masker is None or self._redactor.outputs == "off":
            return stopped_by
        return asked.masker.text(stopped_by)

    def shows_secret(self, text: str) -> bool:
        """Return whether the text of sampled tokens holds what records may not show. It has more than the answer: what
        the parser drops from a call, and the stop sequence."""
        return self._redactor.outputs != "off" and bool(self._redactor.scanner.find(text))

    def counts(self, completed: TurnCompleted) -> dict[str, int]:
        """Return the masked places of a turn's record by kind, and count them in the metrics. Payloads must be
        inline."""
        texts = (completed.new_messages, completed.tools, completed.response)
        counts = count_placeholders(*[one for one in texts if isinstance(one, bytes)])
        count("TurnCompleted", counts)
        return counts


def withhold_prompt(plan: TurnPlan) -> TurnPlan:
    """Return a plan whose prompt shows only ids that the session has recorded before."""
    shown = plan.known.depth if plan.stored is None else plan.stored[1]
    prompt = plan.prompt.copy()
    prompt[shown:] = WITHHELD_ID
    return plan._replace(prompt=prompt)


def withhold_output(draft: Draft) -> Draft:
    """Return a draft of the same length and weight versions that shows no id and no log-prob."""
    return replace(draft, ids=[WITHHELD_ID] * len(draft.ids), logprobs=[0.0] * len(draft.ids))
