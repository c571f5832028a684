"""Why a request is not answered by its origin, and what the sandbox is told then.

EgressError
├── EgressUnavailable  [egress] cannot be served here: names the setting and the remedy
├── RuleInvalid        a rule that is none: names the rule
└── Refused            one request: becomes the answer that the sandbox gets
"""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus


class EgressError(Exception):
    """Base of the tree above."""


class EgressUnavailable(EgressError):
    """These settings, or this machine, cannot serve [egress]."""


class RuleInvalid(EgressError):
    """A rule of [egress] allow, or of a task, cannot be read."""


class Reason(StrEnum):
    """EgressRequest.reason."""

    rule = "rule"
    private_address = "private_address"
    request_bytes = "request_bytes"
    response_bytes = "response_bytes"
    requests = "requests"
    not_recorded = "not_recorded"
    tls = "tls"
    certificate = "certificate"
    unreachable = "unreachable"
    timeout_s = "timeout_s"
    malformed = "malformed"
    upgrade = "upgrade"
    call_ended = "call_ended"


STATUS = {
    Reason.rule: HTTPStatus.FORBIDDEN,
    Reason.private_address: HTTPStatus.FORBIDDEN,
    Reason.request_bytes: HTTPStatus.FORBIDDEN,
    Reason.requests: HTTPStatus.FORBIDDEN,
    Reason.tls: HTTPStatus.FORBIDDEN,
    Reason.upgrade: HTTPStatus.FORBIDDEN,
    Reason.malformed: HTTPStatus.BAD_REQUEST,
    Reason.response_bytes: HTTPStatus.BAD_GATEWAY,
    Reason.unreachable: HTTPStatus.BAD_GATEWAY,
    Reason.certificate: HTTPStatus.BAD_GATEWAY,
    Reason.timeout_s: HTTPStatus.GATEWAY_TIMEOUT,
    Reason.not_recorded: HTTPStatus.GATEWAY_TIMEOUT,
    Reason.call_ended: HTTPStatus.GATEWAY_TIMEOUT,
}
"""429 and 503 are never used: HTTP clients repeat such requests by themselves."""

_SAYS = {
    Reason.rule: "no rule grants it; one of [egress] allow must, and one of the task's own if it has any",
    Reason.private_address: "the host has no public address, and [egress] private_hosts does not name it",
    Reason.request_bytes: "its body is longer than [egress] request_bytes",
    Reason.requests: "this call has made as many requests as [egress] requests grants",
    Reason.tls: "[egress] tls does not let this https request through",
    Reason.upgrade: "protocol upgrades (websocket) are not served",
    Reason.malformed: "it is no request for an HTTP proxy",
    Reason.response_bytes: "its answer is longer than [egress] response_bytes",
    Reason.unreachable: "the host did not answer",
    Reason.certificate: "the host's certificate is not trusted; [egress] upstream_ca names those of your own mirrors",
    Reason.timeout_s: "it took longer than [egress] timeout_s",
    Reason.not_recorded: "[egress] mode = replay, and the recording holds no answer to it",
    Reason.call_ended: "the call ended first",
}


class Refused(EgressError):
    """One request's end. `detail` says what is wrong with a malformed one."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason, self.detail = reason, detail

    @property
    def status(self) -> int:
        """Of the answer."""
        return int(STATUS[self.reason])

    def text(self, method: str, url: str) -> bytes:
        """The answer's body. Made of reason and request alone, so that a re-run gives the same bytes again."""
        what = f"{method} {url}".strip() or "the request"
        said = f"{_SAYS[self.reason]}: {self.detail}" if self.detail else _SAYS[self.reason]
        return f"turnlog egress: {what} was refused ({self.reason}): {said}.\n".encode(errors="replace")
