"""What comes to the embedded registry: any body and any path is answered with a 2xx or a 4xx in Confluent's shape."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as fuzzing
from hypothesis import strategies as st

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.embedded.registry_app import BODY_BYTES, DEFAULT_LEVEL, SCHEMA_BYTES, RegistryApi, SchemaStore
from turnlog.infra.registry import authorization
from turnlog.settings import RegistrySettings

LIMIT = 64 * 1024
NUMBERS = itertools.count()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a registry whose log is in memory; what the application raises comes out."""
    async with serving(RegistrySettings(), body_bytes=LIMIT) as client:
        yield client


@asynccontextmanager
async def serving(
    settings: RegistrySettings, url: str = "http://127.0.0.1:8081", *, body_bytes: int = BODY_BYTES
) -> AsyncIterator[httpx.AsyncClient]:
    """Who does not log in, at that address."""
    async with SchemaStore.open(MemoryLog()) as store:
        transport = httpx.ASGITransport(app=RegistryApi(store, settings, body_bytes=body_bytes).application())
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            yield client


def union(count: int, doc: str = "") -> str:
    """A schema of records that are compared each with each."""
    types = [{"type": "record", "name": f"R{at}", "fields": [], "doc": doc} for at in range(count)]
    return json.dumps({"type": "record", "name": "Many", "fields": [{"name": "f", "type": types}]})


async def test_a_large_schema_delays_no_other_request() -> None:
    async with serving(RegistrySettings()) as http:
        answered, large = 0, asyncio.create_task(http.post("/subjects/large/versions", json={"schema": union(1000)}))
        while not large.done():
            answers = [await http.get("/subjects"), await http.post("/subjects/s/versions", json={"schema": '"int"'})]
            assert [one.status_code for one in answers] == [200, 200]
            answered += not large.done()
        assert (await large).status_code == 200
    assert answered >= 3


async def test_a_schema_that_is_too_large_is_refused_before_it_is_parsed() -> None:
    async with serving(RegistrySettings()) as http:
        for path in ("/subjects/s/versions", "/subjects/s", "/compatibility/subjects/s/versions/latest"):
            refused = await http.post(path, json={"schema": union(1, "ü" * (SCHEMA_BYTES // 2))})
            assert (refused.status_code, refused.json()["error_code"]) == (413, 41301)
            assert f"this registry accepts at most {SCHEMA_BYTES}" in refused.json()["message"]


WORDS = ["type", "record", "name", "fields", "A", "B", "int", "string", "null", "array", "items", "map", "values",
         "enum", "symbols", "fixed", "size", "default", "namespace", "aliases", "logicalType", "decimal", "doc", "é",
         "\ud800", "schema", "schemaType", "AVRO", "references", "compatibility", "NONE", "FULL"]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)
BODIES = st.one_of(
    VALUES.map(lambda schema: json.dumps({"schema": json.dumps(schema)})),
    st.fixed_dictionaries({"name": st.sampled_from("AB"), "type": st.just("record"), "fields": VALUES}).map(
        lambda schema: json.dumps({"schema": json.dumps(schema)})
    ),
    VALUES.map(json.dumps),
    st.text(max_size=20),
)
PARTS = st.sampled_from(["1", "latest", "-1", "²", "9" * 5000, "1e3", "%00", "a\nb"]) | st.text(min_size=1, max_size=4)
PATHS = st.one_of(
    st.tuples(st.just("POST"), PARTS.map("/subjects/{}/versions".format)),
    st.tuples(st.just("POST"), PARTS.map("/subjects/{}".format)),
    st.tuples(st.just("GET"), PARTS.map("/subjects/s/versions/{}".format)),
    st.tuples(st.just("GET"), PARTS.map("/schemas/ids/{}".format)),
    st.tuples(st.just("POST"), PARTS.map("/compatibility/subjects/s/versions/{}".format)),
    st.tuples(st.sampled_from(["GET", "PUT"]), PARTS.map("/config/{}".format)),
)


@fuzzing(
    deadline=None, database=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(PATHS, BODIES)
async def test_no_request_is_the_registrys_failure(
    http: httpx.AsyncClient, request_line: tuple[str, str], body: str
) -> None:
    await http.post("/subjects/s/versions", json={"schema": '"int"'})
    method, path = request_line
    answer = await http.request(method, quote(path), content=body.encode(errors="surrogatepass"))
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()) == {"error_code", "message"}


@pytest.mark.parametrize("depth", [300, 2000, 100_000])
@pytest.mark.parametrize("schema", [True, False])
async def test_deep_json_is_refused_by_name(http: httpx.AsyncClient, depth: int, schema: bool) -> None:
    deep = "[" * min(depth, LIMIT // 2) + "]" * min(depth, LIMIT // 2 - 100)
    answer = await http.post("/subjects/s/versions", content=json.dumps({"schema": deep}) if schema else deep)
    assert (answer.status_code, answer.json()["error_code"]) == (422, 42201)


async def test_a_page_of_a_browser_changes_and_reads_nothing(http: httpx.AsyncClient) -> None:
    posted = {"content": json.dumps({"schema": '"int"'}), "headers": {"content-type": "text/plain"}}
    for origin in ("http://evil.example", "null", "http://127.0.0.1:8081"):
        headers = {**posted["headers"], "origin": origin}
        answer = await http.post("/subjects/s/versions", content=posted["content"], headers=headers)
        assert (answer.status_code, answer.json()["error_code"]) == (403, 40301)
        assert (await http.get("/subjects", headers={"origin": origin})).status_code == 403
    assert (await http.get("/subjects")).json() == []


@pytest.mark.parametrize(
    ("url", "status"),
    [("http://evil.example", 421), ("http://127.0.0.1.evil.example:8081", 421), ("http://localhost:8081", 200),
     ("http://127.0.0.1:8081", 200), ("http://[::1]:8081", 200)],
)  # fmt: skip
async def test_a_name_of_somebody_elses_that_leads_here_is_refused(url: str, status: int) -> None:
    async with serving(RegistrySettings(), url) as http:
        for path in ("/", "/subjects"):
            assert (await http.get(path)).status_code == status
    async with serving(RegistrySettings(host="0.0.0.0"), "http://registry:8081") as http:
        assert (await http.get("/subjects")).status_code == 200


@pytest.mark.parametrize("login", [{"username": "u", "password": "päss"}, {"token": "t"}])
async def test_who_does_not_log_in_as_its_clients_do_changes_and_reads_nothing(login: dict[str, str]) -> None:
    async with serving(RegistrySettings(**login)) as http:  # type: ignore[arg-type]
        right = authorization(RegistrySettings(**login))  # type: ignore[arg-type]
        for wrong in ("", "Bearer", f"{right}x", "Basic bm9ib2R5Og==", "Bearer \xff"):
            answer = await http.put(
                "/config", json={"compatibility": "NONE"}, headers=[(b"authorization", wrong.encode("latin-1"))]
            )
            assert (answer.status_code, answer.json()["error_code"]) == (401, 40101)
            assert (await http.get("/subjects")).status_code == 401
        assert (await http.get("/")).json() == {}
        assert (await http.get("/config", headers={"authorization": right})).json() == {
            "compatibilityLevel": DEFAULT_LEVEL
        }


async def endless(parts: int) -> AsyncIterator[bytes]:
    for _ in range(parts):
        yield b" " * 1024


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_beyond_the_limit_is_refused(http: httpx.AsyncClient, declared: bool) -> None:
    content = b" " * (LIMIT + 1) if declared else endless(LIMIT // 1024 + 1)
    answer = await http.post("/subjects/s/versions", content=content)
    assert (answer.status_code, answer.json()["error_code"]) == (413, 41301)
    assert "a schema must be smaller" in answer.json()["message"]
