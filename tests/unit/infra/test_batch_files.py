"""A batch file gives its rows, or says that it is none; no bytes end the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from turnlog.infra.batch_files import CorruptBatch, read_rows

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
