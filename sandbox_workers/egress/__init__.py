"""Egress: what calls whose sandbox has network = "allowlist" may reach, and the answers they got.

`Egress` belongs to one worker. For each call it serves an HTTP/1.1 proxy on the listening socket that the sandbox made
inside its own network namespace, so that there is no other way out. Network rules, upstream connections, certificates
and recordings are a module each. docs/egress.md describes what is refused and what that looks like from inside."""

from turnlog.sandbox_workers.egress.policy import EgressUnavailable as EgressUnavailable
from turnlog.sandbox_workers.egress.policy import ProxyUnusable as ProxyUnusable
from turnlog.sandbox_workers.egress.proxy import GatewayRelay as GatewayRelay
from turnlog.sandbox_workers.egress.worker_egress import Egress as Egress
