"""A Tinker server in this process: log, registry and store in memory, a real learner on a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.fakes.memory_log import MemoryLog
from tests.tiny_model import make_tiny_model
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import all_events
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.plugins.tinker.role import main
from turnlog.plugins.tinker.wire import MESSAGES
from turnlog.schemas.events import Event
from turnlog.schemas.topics import Topic
from turnlog.settings import EngineSettings, ModelSettings, RunSettings, Settings, TinkerSettings, TrainerSettings

KEY = "tml-0123456789abcdef"
BASE = "base"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tinker") / "model")


@pytest.fixture
def tinker_settings(model_folder: Path, tmp_path: Path) -> Settings:
    return Settings(
        run=RunSettings(id="r", directory=str(tmp_path)),
        model=ModelSettings(path=str(model_folder), name=BASE),
        engine=EngineSettings(urls=()),
        trainer=TrainerSettings(threads=1, dtype="float32", learning_rate=1e-3),
        tinker=TinkerSettings(port=free_ports(1)[0], max_rank=4, snapshot_every=3, max_models=3),
    )


class TinkerWorld:
    """One broker, one registry, one store; each life of the server is a connection of its own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.log, self.registry, self.blobs = MemoryLog(), MemoryRegistry(), MemoryBlobs()
        self.points = 0
        """Points of the last life at which it could have died."""

    @contextlib.asynccontextmanager
    async def life(self, *, dies_at: int | None = None) -> AsyncIterator[asyncio.Task[None]]:
        """Run a server while the block runs, or until it dies."""
        connection = MemoryLog(self.log.broker)
        self.blobs.point = connection.point
        async with EventLog.open(connection, self.registry, writer="tinker", blobs=self.blobs) as events:
            role = Role("tinker", "t", self.settings, connection, events, self.blobs, Health("tinker"))
            connection.points, connection.dies_at = 0, dies_at
            running = asyncio.create_task(main(role))
            try:
                yield running
                role.stopping.set()
                await asyncio.wait([running])
            finally:
                self.points = connection.points
                connection.dies_at, self.blobs.point = None, _nothing
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    async def recorded(self, topic: Topic) -> list[Event]:
        """Return the events of a topic."""
        async with EventLog.open(self.log, self.registry, writer="reader", blobs=self.blobs) as events:
            role = Role("reader", "r", self.settings, self.log, events, self.blobs, Health("reader"))
            return await all_events(role, topic)


def _nothing() -> None: ...


@pytest.fixture
async def tinker_world(tinker_settings: Settings) -> TinkerWorld:
    world = TinkerWorld(tinker_settings)
    await apply(world.log, tinker_settings)
    return world


class ApiClient:
    """Calls the server as the SDK does: a call without an answer is sent again."""

    def __init__(self, settings: Settings, key: str = KEY) -> None:
        self._url = f"http://{HOST}:{settings.tinker.port}/api/v1/"
        self._http = httpx.AsyncClient(headers={"X-API-Key": key}, timeout=60, trust_env=False)

    async def once(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send a request, again while the server is away."""
        async with asyncio.timeout(120):
            while True:
                try:
                    answer = await self._http.request(method, self._url + path, **more)
                except httpx.TransportError:
                    await asyncio.sleep(0.02)
                    continue
                if answer.status_code < 500:
                    return answer
                await asyncio.sleep(0.02)

    async def post(self, path: str, body: Any = None, *, key: str = "k") -> dict[str, Any]:
        """Post JSON, or bytes as they are, and return the answer, which must be a success."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body or {}}
        answer = await self.once("POST", path, headers={"X-Idempotency-Key": key}, **content)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def get(self, path: str) -> dict[str, Any]:
        """Return the answer of a GET, which must be a success."""
        answer = await self.once("GET", path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def result(self, future: dict[str, Any]) -> Any:
        """Wait for a result: JSON, or a message for training and samples."""
        while True:
            answer = await self.once("POST", "retrieve_future", json={"request_id": future["request_id"]})
            assert answer.status_code == 200, answer.text
            if answer.headers["content-type"] == "application/x-protobuf":
                kind = "SampleResponse" if "sample_sequence_ids" in future else "ForwardBackwardOutput"
                return MESSAGES[kind].FromString(answer.content)
            found = answer.json()
            if found.get("type") != "try_again":
                return found

    async def session(self, key: str = "k") -> str:
        """Open a session."""
        body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
        return str((await self.post("create_session", body, key=key))["session_id"])

    async def model(self, session: str, number: int = 0, **lora: Any) -> str:
        """Create a model."""
        config = {"rank": 2, "seed": number, "train_unembed": False} | lora
        body = {"session_id": session, "model_seq_id": number, "base_model": BASE, "lora_config": config}
        found = await self.result(await self.post("create_model", body))
        assert "error" not in found, found
        return str(found["model_id"])

    async def train(self, model: str, sequence: int, seed: int = 0, **more: Any) -> dict[str, Any]:
        """Send a forward_backward of random rows."""
        return await self.post("forward_backward", training_request(model, sequence, seed, **more))

    async def step(self, model: str, sequence: int, rate: float = 1e-2) -> dict[str, Any]:
        """Send an optim_step."""
        body = {"model_id": model, "seq_id": sequence, "adam_params": {"learning_rate": rate}}
        return await self.post("optim_step", body)

    async def close(self) -> None:
        await self._http.aclose()


def training_request(
    model: str, sequence: int, seed: int = 0, *, loss: str = "cross_entropy", rows: int = 2, length: int = 6,
    forward_only: bool = False, tokens: Any = None,
) -> bytes:  # fmt: skip
    """Return a ForwardBackwardRequest with random rows, all of whose targets count."""
    rng = np.random.default_rng(seed)
    request = MESSAGES["ForwardBackwardRequest"](
        model_id=model, seq_id=sequence, loss_fn=loss, forward_only=forward_only
    )
    for _ in range(rows):
        ids = rng.integers(5, 300, length + 1) if tokens is None else np.asarray(tokens)
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = ids[:-1].astype("<i4").tobytes()
        inputs = datum.loss_fn_inputs
        inputs["target_tokens"].dtype, inputs["target_tokens"].dense = 2, ids[1:].astype("<i8").tobytes()
        names = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
        for name in names:
            values = np.ones(len(ids) - 1) if name == "weights" else rng.standard_normal(len(ids) - 1)
            inputs[name].dtype, inputs[name].dense = 1, values.astype("<f4").tobytes()
    content: bytes = request.SerializeToString()
    return content


@pytest.fixture
async def api(tinker_settings: Settings) -> AsyncIterator[ApiClient]:
    client = ApiClient(tinker_settings)
    yield client
    await client.close()
