"""Data that the index only points to: tokens of sessions, and single records of the log.

They are read from the topics or from the archive, which are opened when a page first needs them. Pages of the index
need neither.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from turnlog.consumers import dead_letters
from turnlog.consumers.event_json import as_json
from turnlog.consumers.index import fate
from turnlog.consumers.index.reader import Index, SessionView, where_of
from turnlog.consumers.index.schema import NUMBER, OFFSET_BITS, PARTITION_BITS, place_of, standing
from turnlog.infra.batch_files import read_tokens
from turnlog.infra.blobs import BlobMissing
from turnlog.infra.log import Partition, Record
from turnlog.infra.roles.role import Role
from turnlog.plugins.dashboard import Unknown, require_found
from turnlog.plugins.dashboard.harmless import visible
from turnlog.schemas.content import ContentCipher
from turnlog.schemas.events import SessionStarted, StepCompleted

T = TypeVar("T")
KEPT = 8
"""Number of sessions whose tokens are cached."""
FIGURES = ("entropy", "gap", "ratio")
"""Figures of a trained token from its step's token file. `gap` is the trainer's log-prob minus the engine's."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
NO_MODEL = "[model] path names no tokenizer.json: tokens are shown by id"
OTHER_MODEL = "the tokenizer of [model] path is not the one that the session was sampled with: tokens are shown by id"


class Vocabulary:
    """Texts of token ids, if the model's tokenizer is available."""

    def __init__(self, folder: str) -> None:
        """`folder` is [model] path. Without a tokenizer.json in it, there are no texts."""
        path = Path(folder) / "tokenizer.json"
        data = path.read_bytes() if folder and path.is_file() else b""
        self.sha256 = hashlib.sha256(data).hexdigest() if data else ""
        self._tokenizer: Any = Tokenizer.from_str(data.decode()) if data else None

    def lacks(self, sha256: str) -> str:
        """Return why there are no texts for tokens of the tokenizer with this hash, or "" if there are. An empty hash
        means that none was recorded."""
        if self._tokenizer is None:
            return NO_MODEL
        return OTHER_MODEL if sha256 not in ("", self.sha256) else ""

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each id, with invisible characters as escapes. An incomplete character is shown as the
        tokenizer writes it."""
        wanted = sorted(set(ids))
        found = self._tokenizer.decode_batch([[each] for each in wanted], skip_special_tokens=False)
        return {
            each: visible(text if UNKNOWN not in text else self._tokenizer.id_to_token(each) or text)
            for each, text in zip(wanted, found, strict=True)
        }

    def special(self, ids: Iterable[int]) -> list[int]:
        """Return the ids that are special tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        return sorted({each for each in ids if each in added and added[each].special})


@dataclass(frozen=True, slots=True)
class SessionTokens:
    """Tokens of a session, and what a page needs to colour them."""

    turns: Sequence[fate.TurnTokens]
    figures: Mapping[str, Mapping[str, NDArray[np.float32]]]
    """Sample id -> logprob, entropy and ratio of the trainer by position; NaN where the step's file has no value."""
    texts: Mapping[int, str]
    special: Sequence[int]
    notes: Sequence[str]
    """Descriptions of what is missing, and why."""
    as_of: Mapping[str, Any]

    def body(self) -> dict[str, Any]:
        """Return compact JSON: each text once, and rarely changing values as [value, count]. docs/dashboard.md has the
        schema."""
        reasons: dict[str, int] = {}
        turns = [self._turn(turn, reasons) for turn in self.turns]
        return {
            "reasons": list(reasons), "turns": turns, "texts": {str(each): text for each, text in self.texts.items()},
            "special": list(self.special), "notes": list(self.notes), "as_of": self.as_of,
        }  # fmt: skip

    def _turn(self, turn: fate.TurnTokens, reasons: dict[str, int]) -> dict[str, Any]:
        known = self.figures.get(turn.sample_id or "")
        figures = None
        if known is not None and len(turn.positions) == len(turn.ids):
            own = {name: _at(column, turn.positions) for name, column in known.items()}
            if turn.logprob_kind == "at_temperature" or turn.temperature == 1.0:  # else two distributions
                own["gap"] = own["logprob"] - turn.logprobs
            figures = {name: _numbers(own[name]) for name in FIGURES if name in own}
        return {
            "at": where_of(turn.place), "context": turn.context, "delta": turn.delta.tolist(), "ids": turn.ids.tolist(),
            "logprobs": _numbers(turn.logprobs), "versions": runs(turn.versions.tolist()),
            "fate": runs([reasons.setdefault(reason, len(reasons)) for reason in turn.reasons]),
            "advantage": turn.advantage, "segment": turn.segment, "sample": turn.sample_id, "batch": turn.batch,
            "step": turn.step, "temperature": turn.temperature, "logprob_kind": turn.logprob_kind, "figures": figures,
        }  # fmt: skip


class Records:
    """Records of a run behind its index. Use it from one event loop."""

    def __init__(
        self, index: Path, vocabulary: Vocabulary, connect: Callable[[], AbstractAsyncContextManager[Role]]
    ) -> None:
        """`connect` opens a role on the topics or the archive. It is called when a record is first requested."""
        self._index = index
        self._vocabulary = vocabulary
        self._connect = connect
        self._stack = AsyncExitStack()
        self._role: Role | None = None
        self._one, self._opening = asyncio.Lock(), asyncio.Lock()
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    async def close(self) -> None:
        """Close the log."""
        await self._stack.aclose()

    async def tokens(self, session_id: str) -> bytes:
        """Return the JSON of SessionTokens for the present state of the index. Raises Unknown, and what
        `session_tokens` raises."""
        with Index.open(self._index) as index:
            key = session_id, index.as_of().written_ms
        if key not in self._kept:
            async with self._one:  # one at a time, because a whole session is in memory
                if key not in self._kept:
                    self._kept[key] = await self._read(session_id)
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]

    async def _read(self, session_id: str) -> bytes:
        role = await self.open_role()
        with Index.open(self._index) as index, index.snapshot():
            view = require_found(index.session(session_id), f"session {session_id}")
            found = await session_tokens(role, index, view, self._vocabulary)
        return orjson.dumps(await asyncio.to_thread(found.body))

    async def record(self, topic: str, partition: int, offset: int) -> dict[str, Any]:
        """Return a record as a JSON object. Raises Unknown, RecordGone, LogError."""
        if topic not in NUMBER or partition not in range(1 << PARTITION_BITS) or offset not in range(1 << OFFSET_BITS):
            raise Unknown(f"{topic}[{partition}]@{offset} is not in the index")
        place = place_of(topic, partition, offset)
        role = await self.open_role()
        there = await role.log.topics()
        if topic not in there or partition >= there[topic].partitions:
            raise Unknown(f"{topic}[{partition}] is not on the log")
        event = (await fate.events_at(role, [place]))[place]
        body = as_json(Record(topic, partition, offset, b"", b"", (), 0), event)
        del body["time_ms"]
        return body

    async def requeue(self, letter_id: str) -> tuple[Partition, int]:
        """Append the record of a dead letter again, unless that was done before, and return its position. Raises
        LetterError, LogError, ReadOnlyArchive."""
        role = await self.open_role()
        letter = dead_letters.find_letter(await dead_letters.read(role), letter_id)
        if times := (await dead_letters.count_requeues(role, dead_letters.first_places([letter]))).get(
            letter.event_id, 0
        ):
            raise dead_letters.NotRequeueable(f"it was requeued {times} times: `requeue --again` requeues it once more")
        async with role.log.appender() as appender:
            return await dead_letters.requeue(role, appender, letter, times=0)

    async def skip(self, place: str, reason: str) -> None:
        """Order the assembler to skip a record. Raises NotSkippable, LogError, ReadOnlyArchive."""
        await dead_letters.skip(await self.open_role(), place, reason)

    async def open_role(self) -> Role:
        """Return the role that reads the log. The first call opens it."""
        async with self._opening:
            if self._role is None:
                self._role = await self._stack.enter_async_context(self._connect())
            return self._role


async def session_tokens(role: Role, index: Index, view: SessionView, vocabulary: Vocabulary) -> SessionTokens:
    """Return the tokens of a session. Raises RecordGone, NothingToReplay, LogError, ArchiveError."""
    turns = await fate.tokens(role, index, view)
    notes = [] if turns else ["no turn of this session has tokens on the log"]
    figures = await _figures(role, view, notes)
    started = await started_of(role, index, view)
    lacks = vocabulary.lacks("" if started is None else started.tokenizer_sha256)
    ids = set().union(*(set(each.tolist()) for turn in turns for each in (turn.ids, turn.delta)))
    if lacks:
        notes.append(lacks)
    texts = {} if lacks else vocabulary.texts(ids)
    return SessionTokens(turns, figures, texts, [] if lacks else vocabulary.special(ids), notes, view.as_of.body())


async def started_of(role: Role, index: Index, view: SessionView) -> SessionStarted | None:
    """Return the session's SessionStarted, which the index holds as it stands on the log."""
    started = next((each["place"] for each in view.events if each["kind"] == SessionStarted.__name__), None)
    row = None if started is None else index.row("SELECT value FROM session_events_records WHERE place = ?", started)
    if row is None or started is None:
        return None
    place, offset = standing(started)
    event = await role.events.decode(Record(place.topic, place.number, offset, b"", row["value"], (), 0))
    return event if isinstance(event, SessionStarted) else None


async def _figures(role: Role, view: SessionView, notes: list[str]) -> dict[str, dict[str, NDArray[np.float32]]]:
    """Return the figures of each sample in a batch whose step left a token file. Add what is missing to `notes`."""
    steps: dict[int, set[str]] = {}
    for row in view.batch_rows:
        if row["step_place"] is not None:
            steps.setdefault(row["step_place"], set()).add(row["sample_id"])
    found: dict[str, dict[str, NDArray[np.float32]]] = {}
    for place, event in (await fate.events_at(role, steps)).items():
        if not isinstance(event, StepCompleted) or event.token_file is None:
            continue
        try:
            content = await role.blobs.get(event.token_file)
        except BlobMissing as error:
            notes.append(f"what step {event.step} made of its tokens is not in the store: {error}")
            continue
        if role.events.keys is not None:
            await role.events.keys.refresh()
        found |= await asyncio.to_thread(_columns, content, steps[place], role.events.keys)
    return found


def _columns(
    content: bytes, samples: Iterable[str], cipher: ContentCipher | None
) -> dict[str, dict[str, NDArray[np.float32]]]:
    """Return the columns of a token file by sample and position."""
    wanted = list(samples)
    table = read_tokens(content, wanted, cipher)
    names = np.array(table["sample_id"].cast(pa.string()).to_pylist(), dtype=object)
    at = table["position"].to_numpy()
    found = {}
    for sample in wanted:
        own = np.flatnonzero(names == sample)
        if len(own):
            found[sample] = {
                name: _scatter_values(at[own], table[name].to_numpy()[own]) for name in ("logprob", "entropy", "ratio")
            }
    return found


def _scatter_values(at: NDArray[np.int32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    found = np.full(int(at.max()) + 1, np.nan, dtype=np.float32)
    found[at] = values
    return found


def _at(column: NDArray[np.float32], positions: Sequence[int]) -> NDArray[np.float32]:
    """Return the values at positions; NaN beyond the end, because the file ends with its last trained token."""
    at = np.array(positions, dtype=np.int64)
    inside = at < len(column)
    return np.where(inside, column[np.where(inside, at, 0)], np.float32(np.nan))


def runs(values: Sequence[T]) -> list[list[Any]]:
    """Run-length encode values as [value, count]."""
    found: list[list[Any]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found


def _numbers(values: NDArray[np.float32]) -> list[float]:
    """Round to four decimals. NaN becomes null in JSON."""
    return np.round(values.astype(np.float64), 4).tolist()  # type: ignore[no-any-return]
