"""Settings of tool execution: where calls run, within which bounds, and what of the network they may reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """[sandbox] Tool execution."""

    backend: str = "bubblewrap"
    """bubblewrap | subprocess: of this machine; serves calls that ask for either."""
    allow_unisolated: bool = False
    """Where bubblewrap cannot start, run tools as plain processes that see this machine's files, processes and network;
    else the worker ends with the reason."""
    backends: tuple[str, ...] = ()
    """Served beside it, for calls that ask for them: wasm | docker | e2b"""
    slots: int = 4
    """Calls that run at once in one worker."""
    prewarm: int = 4
    """Sandboxes kept ready for the calls that are next in the queue."""
    max_uses: int = 1000
    """Calls after which a sandbox is replaced though its resets were clean."""
    health_s: float = 10.0
    """Pause between looks at idle sandboxes; a dead one is replaced before a call meets it."""
    max_attempts: int = 3
    cpu_s: float = 10.0
    wall_s: float = 30.0
    memory_bytes: int = 512 * 2**20
    pids: int = 64
    disk_bytes: int = 64 * 2**20
    output_bytes: int = 64 * 2**10
    argument_bytes: int = 4 * 2**20
    """A call with longer arguments is refused."""
    first_uid: int = 200000
    """Host uid of slot 0 when started by root; slot n runs as first_uid + n."""
    cgroups: str = "auto"
    """auto: used where they can be written | required: the worker ends where they cannot | off"""
    cpus: float = 1.0
    """Cores that one sandbox may use at once, where there are cgroups."""
    image_folder: str = ""
    """Root file systems by name, for calls that ask bubblewrap for an image; empty: the host's /usr is all there is."""
    docker_image: str = "python:3.11-slim"
    """For calls that name none; never pulled while a call waits: pull it on the worker's machine."""
    docker_runtime: str = ""
    """runc | runsc (gVisor) | kata (microVMs); empty: the daemon's default."""
    e2b_template: str = "base"
    """For calls that name no image; the key is read from E2B_API_KEY alone."""
    wasm_fuel: int = 0
    """Instructions per call, so that a call ends at the same one wherever it runs; 0: wall_s and cpu_s alone end it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressSettings:
    """[egress] What calls whose sandbox has network = "allowlist" may reach, through the worker's proxy."""

    mode: str = "live"
    """live: every request goes out | record: and its answer is kept | replay: only kept answers, nothing goes out"""
    allow: tuple[str, ...] = ()
    """Rules `METHODS SCHEME://HOST[:PORT]/PATH`, * as wildcard: "GET,HEAD https://pypi.example/simple/*"."""
    tls: str = "intercept"
    """Of https: intercept (rules and cache see the request; sandboxes trust a CA of the worker) | tunnel (host rules
    alone, live only) | refuse"""
    private_hosts: tuple[str, ...] = ()
    """host:port of mirrors of yours that may have private addresses; all others must be public."""
    upstream_ca: str = ""
    """PEM file of authorities that sign your mirrors, trusted beside the machine's own."""
    cache: str = "default"
    """Which recording `record` writes and `replay` reads."""
    timeout_s: float = 20.0
    request_bytes: int = 2**20
    """Longest body of a request."""
    response_bytes: int = 16 * 2**20
    """Longest body of an answer."""
    requests: int = 100
    """Of one call."""
