"""A batch file gives its rows, or says that it is none; no bytes end the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.fakes.batches import synthetic_rows
from turnlog.infra.batch_files import CorruptBatch, read_rows, read_tokens, write_tokens
from turnlog.schemas import MasterKeyMissing, SessionIsErased
from turnlog.schemas.content import HEAD_BYTES

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize(
    "changes",
    [{5143: 1}, {2311: 128, 4801: 0, 2066: 127, 3723: 255}, {2303: 116}, {2202: 1, 3126: 255}, {3392: 255}],
    ids=["TypeError", "SystemError", "a segmentation fault", "ValueError", "no text"],
)
def test_a_file_of_rows_with_bytes_changed_is_corrupt_or_holds_rows(changes: dict[int, int]) -> None:
    """Whatever Arrow and numpy made of the bytes before: in a process of its own, since one of them ended it."""
    program = (
        "import sys\nfrom turnlog.infra.batch_files import CorruptBatch, read_rows\n"
        "try: read_rows(sys.stdin.buffer.read())\nexcept CorruptBatch as error: print(error)"
    )
    content = bytearray((GOLDEN / "batch-rows-2.arrow").read_bytes())
    for at, byte in changes.items():
        content[at] = byte
    done = subprocess.run([sys.executable, "-c", program], input=bytes(content), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert not done.stdout or b"not a batch file (5418 bytes)" in done.stdout


def test_a_column_of_another_type_is_named() -> None:
    table = pa.ipc.open_file(pa.BufferReader((GOLDEN / "batch-rows-2.arrow").read_bytes())).read_all()
    at = table.column_names.index("rewards")
    sink = pa.BufferOutputStream()
    other = table.set_column(at, "rewards", table["rewards"].cast(pa.float64()))
    with pa.ipc.new_file(sink, other.schema) as writer:
        writer.write_table(other)
    with pytest.raises(CorruptBatch, match="column rewards is double, wanted float"):
        read_rows(bytes(sink.getvalue()))


class Reversing:
    """A cipher that anybody can undo."""

    def __init__(self, *erased: str) -> None:
        self._erased = erased

    def encrypt(self, session_id: str, about: bytes, parts: Sequence[bytes]) -> tuple[bytes, bytes]:
        if session_id in self._erased:
            raise SessionIsErased(session_id)
        return about.ljust(HEAD_BYTES)[:HEAD_BYTES], b"".join(parts)[::-1]

    def decrypt(self, about: bytes, head: bytes, parts: Sequence[bytes]) -> bytes | None:
        assert head == about.ljust(HEAD_BYTES)[:HEAD_BYTES]
        return b"".join(parts)[::-1]

    def is_erased(self, session_id: str) -> bool:
        return False  # a session that is erased while the file is written was not erased before


def test_each_row_of_a_token_file_is_encrypted_apart_and_those_of_erased_sessions_are_left_out() -> None:
    rows = synthetic_rows(3, rows=64)
    gone = rows.session_ids[5]
    random = np.random.default_rng(0)
    figures = {name: random.random(len(rows.token_ids), "<f4") for name in ("logprob", "ratio")}
    sealed = write_tokens(rows, figures, Reversing(gone))
    erased = {sample for sample, own in zip(rows.sample_ids, rows.session_ids, strict=True) if own == gone}
    some = [sample for at, sample in enumerate(rows.sample_ids) if at % 3 != 1]
    found = read_tokens(sealed, some, Reversing()).to_pylist()
    wanted = read_tokens(write_tokens(rows, figures), some, None).to_pylist()
    assert len(found) == len(wanted) > 0
    for row, before in zip(found, wanted, strict=True):
        if row["sample_id"] in erased:
            assert np.isnan([row["logprob"], row["ratio"]]).all()
        else:
            assert row == before
    assert not read_tokens(sealed, ["no sample"], Reversing()).num_rows
    with pytest.raises(MasterKeyMissing, match=r"token file .*TURNLOG_ERASURE_MASTER_KEYS_FILE"):
        read_tokens(sealed, some, None)
