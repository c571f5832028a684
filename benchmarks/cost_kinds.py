"""What kind of work a role's process did, by what its probe recorded (cost_probe/sitecustomize.py).

A sample belongs to the kind of its innermost line, if the text of that line calls a C function of a kind (a hash, JSON,
SQL), else to that of the innermost frame whose file tells a kind. Frames of asyncio and of other general modules tell
none: they work for whoever called them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

JSON, HASHING, ENCODING, KAFKA, HTTP = "JSON", "hashing", "encoding of records", "Kafka client", "HTTP"
TOKENS, SQL, STORE, METRICS, LOGGING = "tokens", "SQL", "object store", "metrics", "logging"
STARTS, LOOP, OTHER, PROBE = "starting of processes", "event loop", "other libraries", "probe"
THREADS, STARTED = "other threads", "started processes"
LINES = (
    (JSON, re.compile(r"\b(orjson|json|msgspec\.json)\.(loads|dumps|encode|decode)|\.json\(\)")),
    (HASHING, re.compile(r"\b(hashlib|sha256|blake2b|hmac|md5|hexdigest|digest)\b")),
    (SQL, re.compile(r"\.(execute|executemany|executescript)\(")),
    (STARTS, re.compile(r"\b(Popen|fork|posix_spawn|fork_exec)\(")),
)
"""Kind -> pattern of a line that calls a C function of that kind."""
FILES = (
    (PROBE, ("cost_probe/",)),
    (JSON, ("/json/", "/msgspec/", "/orjson/")),
    (HASHING, ("/hashlib.py", "/hmac.py", "turnlog/schemas/ids.py", "/schemas/ids.py")),
    (KAFKA, ("/aiokafka/", "/infra/kafka/", "/faust/", "/mode/")),
    (ENCODING, ("/fastavro/", "/schemas/", "/infra/event_log.py", "/infra/registry.py")),
    (TOKENS, ("/tokenizers/", "/transformers/", "/jinja2/", "/gateway/prompts.py", "/gateway/chat_template.py")),
    (STORE, ("/infra/s3.py", "/infra/blobs.py", "/minio/", "/botocore/", "/aiobotocore/")),
    (HTTP, ("/uvicorn/", "/starlette/", "/httptools/", "/h11/", "/httpx/", "/httpcore/", "/anyio/", "/aiohttp/",
            "/urllib3/", "/http/", "/wsproto/", "/websockets/", "/yarl/", "/multidict/")),
    (METRICS, ("/prometheus_client/",)),
    (LOGGING, ("/logging/",)),
    (STARTS, ("/subprocess.py",)),
    (SQL, ("/sqlite3/",)),
)  # fmt: skip
"""Kind -> parts of the paths of files that do its work."""
ROOMS = ("producers/gateway", "producers", "processors/core", "processors/runtime", "sandbox_workers", "consumers",
         "infra/roles", "infra", "plugins", "src/turnlog")  # fmt: skip
"""Folders of turnlog, which are a kind each: what is left of them is their own work."""
PRODUCT = re.compile(
    r"/(?:src/turnlog/)?((?:" + "|".join(sorted({room.partition("/")[0] for room in ROOMS})) + ")/.*)$"
)
"""Path of a file of turnlog, whose packages are links in src/turnlog."""


def kind_of(line: str, frames: Sequence[Sequence[str]]) -> str:
    """Return the kind of one sample: the text of its innermost line, and [file, function] of its frames, innermost
    first."""
    kinds = [_kind_of_file(file) for file, _ in frames]
    if PROBE in kinds:
        return PROBE
    named = (kind for kind, pattern in LINES if pattern.search(line))
    return next(named, None) or next(filter(None, kinds), LOOP)


def _kind_of_file(file: str) -> str | None:
    """Return the kind that a file tells, a folder of turnlog among them; None for one that works for its callers."""
    for kind, parts in FILES:
        if any(part in file for part in parts):
            return kind
    if "/site-packages/" in file and "/uvloop/" not in file and "/turnlog/" not in file:
        return OTHER
    inside = PRODUCT.search(file) if "/site-packages/" not in file and "/lib/python" not in file else None
    return next((room for room in ROOMS if inside and inside[1].startswith(room)), None)


def shares(samples: Iterable[Mapping[str, Any]], *, main_s: float, process_s: float) -> dict[str, float]:
    """Return kind -> share of the CPU time of a process, without that of the probe. The threads beside the main one are
    a kind of their own."""
    seconds: Counter[str] = Counter()
    for sample in samples:
        seconds[kind_of(sample["line"], sample["frames"])] += sample["seconds"]
    sampled = sum(seconds.values())
    seconds[THREADS] += max(0.0, process_s - max(main_s, sampled))
    del seconds[PROBE]
    whole = sum(seconds.values())
    return {kind: spent / whole for kind, spent in seconds.most_common()} if whole else {}


def hottest(samples: Iterable[Mapping[str, Any]], count: int) -> list[tuple[str, float]]:
    """Return the functions of turnlog and of libraries with the most time of their own lines, as (FILE:FUNCTION,
    seconds)."""
    seconds: Counter[str] = Counter()
    for sample in samples:
        file, function = sample["frames"][0]
        if kind_of(sample["line"], sample["frames"]) == PROBE:
            continue
        seconds["/".join(file.split("/")[-2:]) + ":" + function] += sample["seconds"]
    return seconds.most_common(count)
