"""Settings of tool execution: where calls run, within which bounds, and what of the network they may reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from msgspec import Meta

from turnlog.names import EntryPointGroup
from turnlog.setting_types import Amount, Bytes, Count, Offered, Port, Seconds, Signs

Interception = Literal["intercept", "tunnel", "refuse"]
Local = Literal["bubblewrap", "subprocess"]
LOCAL: tuple[str, ...] = get_args(Local)
"""Backends of this machine, whose sandboxes see a root that it can hash. Either serves calls that ask for either: the
operator decides which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """[sandbox] Tool execution."""

    backend: Local = "bubblewrap"
    """Of this machine; serves calls that ask for either."""
    allow_unisolated: bool = False
    """Where bubblewrap cannot start, run tools as plain processes that see this machine's files, processes and network;
    else the worker ends with the reason."""
    backends: Annotated[tuple[str, ...], Offered(EntryPointGroup.SANDBOX_BACKENDS, ("wasm", "docker", "e2b"))] = ()
    """Served beside it, for calls that ask for them."""
    slots: Annotated[int, Meta(ge=1, le=10_000)] = 4
    """Calls that run at once in one worker."""
    prewarm: Amount = 4
    """Sandboxes kept ready for the calls that are next in the queue."""
    max_uses: Count = 1000
    """Calls after which a sandbox is replaced though its resets were clean."""
    health_s: Seconds = 10.0
    """Pause between looks at idle sandboxes; a dead one is replaced before a call meets it."""
    max_attempts: Count = 3
    """Runs of a call whose sandbox or worker goes away; then it ends as infra_error. From 3 on, what a call has done
    itself is told from that."""
    cpu_s: Seconds = 10.0
    """Processor time of one call, all its processes together."""
    wall_s: Seconds = 30.0
    """From a call's start to its end."""
    agent_s: Seconds = 3600.0
    """In place of cpu_s and wall_s for a call that is a whole agent (docs/agents.md)."""
    credential_key: Annotated[str, Signs(several=True)] = field(default="", repr=False)
    """Shared by runners and sandbox workers: the first seals the tokens of sessions whose agent is a program; more,
    with white space between them, open, too, while keys are rotated. Empty: that of the run's directory."""
    memory_bytes: Annotated[int, Meta(ge=2**20, le=2**63 - 1)] = 512 * 2**20
    """Of one call."""
    pids: Annotated[int, Meta(ge=1, le=4_194_304)] = 64
    """Processes and threads of one call at once."""
    disk_bytes: Annotated[int, Meta(ge=4096, le=2**63 - 1)] = 64 * 2**20
    """Of a workspace."""
    output_bytes: Annotated[int, Meta(ge=1024, le=2**31 - 1)] = 64 * 2**10
    """Of a call's answer; the rest is cut off."""
    argument_bytes: Bytes = 4 * 2**20
    """A call with longer arguments is refused."""
    first_uid: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 200000
    """Host uid of slot 0 when started by root; slot n runs as first_uid + n."""
    cgroups: Literal["auto", "required", "off"] = "auto"
    """auto: used where they can be written; required: the worker ends where they cannot."""
    cpus: Annotated[float, Meta(gt=0, le=1024)] = 1.0
    """Cores that one sandbox may use at once, where there are cgroups."""
    image_folder: str = ""
    """Root file systems by name, for calls that ask bubblewrap for an image; empty: the host's /usr is all there is."""
    docker_image: str = "python:3.11-slim"
    """For calls that name none; never pulled while a call waits: pull it on the worker's machine."""
    docker_runtime: Literal["", "runc", "runsc", "kata"] = ""
    """runsc is gVisor, kata microVMs; empty: the daemon's default."""
    e2b_template: str = "base"
    """For calls that name no image; the key is read from E2B_API_KEY alone."""
    wasm_fuel: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Instructions per call, so that a call ends at the same one wherever it runs; 0: wall_s and cpu_s alone end it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressSettings:
    """[egress] What calls whose sandbox has network = "allowlist" may reach, through the worker's proxy."""

    mode: Literal["live", "record", "replay"] = "live"
    """live: every request goes out; record: and its answer is kept; replay: only kept answers, nothing goes out."""
    allow: tuple[str, ...] = ()
    """Rules `METHODS SCHEME://HOST[:PORT]/PATH`, * as wildcard: "GET,HEAD https://pypi.example/simple/*"."""
    tls: Interception = "intercept"
    """Of https: intercept (rules and cache see the request; sandboxes trust a CA of the worker), tunnel (host rules
    alone, live only), or refuse."""
    private_hosts: tuple[str, ...] = ()
    """host:port of mirrors of yours that may have private addresses; all others must be public."""
    upstream_ca: str = ""
    """PEM file of authorities that sign your mirrors, trusted beside the machine's own."""
    cache: str = "default"
    """Which recording `record` writes and `replay` reads."""
    timeout_s: Seconds = 20.0
    """Of one request with its answer; of a tunnel, between two of its parts."""
    request_bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 2**20
    """Longest body of a request."""
    response_bytes: Bytes = 16 * 2**20
    """Longest body of an answer."""
    requests: Amount = 100
    """Of one call."""
    proxy: str = ""
    """http(s)://host:port of `turnlog egress`, which connects to origins in the workers' place; empty: each itself."""
    signing_key: Annotated[str, Signs(several=True)] = field(default="", repr=False)
    """Shared by workers and `turnlog egress`: the first signs the tokens of calls; more, with white space between them,
    are accepted, too, while keys are rotated."""
    host: str = "127.0.0.1"
    """Where `turnlog egress` listens for workers."""
    port: Port = 3128
    """There."""
    certificate_file: str = ""
    """What `turnlog egress` shows to workers, PEM, with its chain; it then serves https alone. Read again when swapped.
    Without it requests of sandboxes, https ones too, cross the network between the two as they are."""
    key_file: str = ""
    """The certificate's private key, PEM, without a password; empty: certificate_file holds it, too."""
    ca_file: str = ""
    """Authorities that workers check an https `proxy` by, PEM; empty trusts those of this machine."""
