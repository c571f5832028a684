"""Settings of tool execution: where calls run, within which limits, and which network they may reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from msgspec import Meta

from turnlog.names import EntryPointGroup
from turnlog.setting_types import Amount, Bytes, Count, Offered, Port, Seconds, Signs

Interception = Literal["intercept", "tunnel", "refuse"]
Local = Literal["bubblewrap", "subprocess"]
LOCAL: tuple[str, ...] = get_args(Local)
"""Backends of this machine, whose sandboxes see a root that can be hashed. Either backend serves calls that ask for
either, so the operator decides which one runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """[sandbox] Tool execution."""

    backend: Local = "bubblewrap"
    """Sandbox backend of this machine. It serves the calls that ask for bubblewrap or subprocess, whichever of the two
    they name."""
    allow_unisolated: bool = False
    """Whether to run tools as plain processes, which see this machine's files, processes and network, if bubblewrap
    cannot start. If false, the worker ends with the reason instead."""
    backends: Annotated[tuple[str, ...], Offered(EntryPointGroup.SANDBOX_BACKENDS, ("wasm", "docker", "e2b"))] = ()
    """Further backends that this worker serves, for calls that ask for them."""
    slots: Annotated[int, Meta(ge=1, le=10_000)] = 4
    """Number of calls that one worker runs at once."""
    prewarm: Amount = 4
    """Number of sandboxes kept ready for the next calls in the queue."""
    max_attempts: Count = 3
    """Maximum number of runs of a call whose sandbox or worker goes away; after that it ends as infra_error. At least 3
    are needed to attribute repeated deaths to the call itself."""
    cpu_s: Seconds = 10.0
    """CPU seconds of one call, over all of its processes."""
    wall_s: Seconds = 30.0
    """Maximum duration of one call in seconds."""
    agent_s: Seconds = 3600.0
    """Limit in seconds that replaces cpu_s and wall_s for a call that runs a whole agent (docs/agents.md)."""
    credential_key: Annotated[str, Signs(several=True)] = field(default="", repr=False)
    """Keys shared by runners and sandbox workers, separated by white space. The first seals the session tokens of
    agents that are programs; the others are accepted as well, for key rotation. Empty: the key in the run's directory.
    """
    memory_bytes: Annotated[int, Meta(ge=2**20, le=2**63 - 1)] = 512 * 2**20
    """Maximum memory of one call, in bytes."""
    pids: Annotated[int, Meta(ge=1, le=4_194_304)] = 64
    """Maximum number of processes and threads of one call at a time."""
    disk_bytes: Annotated[int, Meta(ge=4096, le=2**63 - 1)] = 64 * 2**20
    """Maximum size of a workspace, in bytes."""
    output_bytes: Annotated[int, Meta(ge=1024, le=2**31 - 1)] = 64 * 2**10
    """Maximum output of a call in bytes; the rest is cut off."""
    argument_bytes: Bytes = 4 * 2**20
    """Maximum size of a call's arguments in bytes; a call with larger ones is rejected."""
    first_uid: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 200000
    """Host uid of slot 0 if the worker is started by root; slot n runs as first_uid + n."""
    cgroups: Literal["auto", "required", "off"] = "auto"
    """auto: use cgroups if they are writable. required: end the worker if they are not. off: do not use them."""
    cpus: Annotated[float, Meta(gt=0, le=1024)] = 1.0
    """Number of cores that one sandbox may use at once; needs cgroups."""
    image_folder: str = ""
    """Folder of root file systems by image name, for calls that ask bubblewrap for an image, and of NAME.wasm modules.
    Empty: only the host's /usr is available."""
    docker_image: str = "python:3.11-slim"
    """Docker image for calls that name none. It is never pulled while a call waits, so pull it on the worker's machine
    beforehand."""
    docker_runtime: Literal["", "runc", "runsc", "kata"] = ""
    """Docker runtime: runsc is gVisor, kata runs microVMs; empty uses the daemon's default."""
    e2b_template: str = "base"
    """E2B template for calls that name no image. The API key is read only from E2B_API_KEY."""
    wasm_fuel: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """WebAssembly instructions per call, so that a call is cut off at the same instruction on every machine. 0: only
    wall_s and cpu_s limit it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressSettings:
    """[egress] Network access, through the worker's proxy, of calls whose sandbox has network = "allowlist"."""

    mode: Literal["live", "record", "replay"] = "live"
    """live: send every request out. record: send it out and store the answer. replay: answer from the recording only;
    nothing goes out."""
    allow: tuple[str, ...] = ()
    """Allowed requests, as rules `METHODS SCHEME://HOST[:PORT]/PATH` with * as wildcard: "GET,HEAD
    https://pypi.example/simple/*"."""
    tls: Interception = "intercept"
    """Treatment of https. intercept: rules and recordings see the request, and sandboxes trust a CA of the worker.
    tunnel: only the host is checked (live mode only). refuse: reject it."""
    private_hosts: tuple[str, ...] = ()
    """Mirrors of yours that may have private addresses, as host:port; all other hosts must be public."""
    upstream_ca: str = ""
    """PEM file of CAs that sign your mirrors, trusted in addition to the machine's own."""
    cache: str = "default"
    """Name of the recording that `record` writes and `replay` reads."""
    timeout_s: Seconds = 20.0
    """Seconds for one request with its answer; for a tunnel, seconds between two pieces of data."""
    request_bytes: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 2**20
    """Maximum body of a request, in bytes."""
    response_bytes: Bytes = 16 * 2**20
    """Maximum body of an answer, in bytes."""
    requests: Amount = 100
    """Maximum number of requests of one call."""
    proxy: str = ""
    """Address http(s)://host:port of `turnlog role egress`, which connects to origins on behalf of the workers; empty:
    each worker connects itself."""
    signing_key: Annotated[str, Signs(several=True)] = field(default="", repr=False)
    """Keys shared by workers and `turnlog role egress`, separated by white space. The first signs the tokens of calls;
    the others are accepted as well, for key rotation."""
    credentials_file: str = ""
    """TOML file with a table ["URL"] of headers for each server that demands credentials of the worker itself (MCP
    servers). They reach no sandbox and no record."""
    host: str = "127.0.0.1"
    """Address that `turnlog role egress` listens on for workers."""
    port: Port = 3128
    """Port that `turnlog role egress` listens on."""
    certificate_file: str = ""
    """PEM file with the certificate of `turnlog role egress` and its chain; if set, it serves only https. Read again
    when the file changes. Without it, the requests of sandboxes travel from the worker to the proxy unencrypted,
    including those that were made by https."""
    key_file: str = ""
    """PEM file with the certificate's private key, without a password; empty means that certificate_file holds the key
    as well."""
    ca_file: str = ""
    """PEM file with the CAs by which workers verify an https `proxy`; empty trusts those of this machine."""
