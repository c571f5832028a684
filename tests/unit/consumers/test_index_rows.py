"""A row has the columns of its table, in their order, by their names."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.schemas.test_codec import EVENTS
from turnlog.consumers.index import schema
from turnlog.consumers.index.rows import ROWS, mask_of, row_of
from turnlog.consumers.index.schema import Table, TableColumn
from turnlog.infra.log import Record
from turnlog.schemas.events import TurnCompleted

RECORD = Record("turns", 0, 5, b"key", b"value", (), 1234)


def table(*columns: str) -> Table:
    return Table("turns", "", tuple(TableColumn(name, "TEXT", "") for name in columns))


@given(event=EVENTS["TurnCompleted"])
@settings(max_examples=5, deadline=None)
def test_a_column_is_the_field_of_its_name_unless_it_has_a_source(event: TurnCompleted) -> None:
    made = row_of(
        table("size", "engine_id", "index", "both", "nothing", "api"),
        index="turn.index", size=(len, "event_id"), both=lambda event: event.api + event.engine_id, nothing=None,
    )  # fmt: skip
    values = (len(event.event_id), event.engine_id, event.turn.index, event.api + event.engine_id, None, event.api)
    assert made.make(7, RECORD, event) == (7, event.event_id, 1234, *values)


def test_a_source_of_no_column_is_refused() -> None:
    with pytest.raises(ValueError, match="turns has no column engine"):
        row_of(table("engine_id"), engine="engine_id")


@pytest.mark.parametrize("kind", ROWS)
@given(data=st.data())
@settings(max_examples=5, deadline=None)
def test_a_row_is_as_wide_as_its_table(kind: type, data: st.DataObject) -> None:
    rows = ROWS[kind]
    assert rows.table in schema.RECORDED
    assert len(rows.make(7, RECORD, data.draw(EVENTS[kind.__name__]))) == 3 + len(rows.table.columns)


def test_a_mask_is_named_whatever_its_spans_add_up_to() -> None:
    assert mask_of([(2, 3, True), (5, 4, True), (9, 1, False)]) == mask_of([(2, 7, True)]) == "07f52d20e6c75f0d"
    assert mask_of([(2**63 - 1, 2**63 - 1, True)])
