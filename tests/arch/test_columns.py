"""The slot table's declaration: one writer a column, and views that cannot write another role's."""

from __future__ import annotations

import numpy as np
import pytest

from inferserve.shm.layout import Writer, columns
from inferserve.shm.slots import SlotTable, SlotView


def test_column_names_are_unique_and_all_are_typed_in_the_view() -> None:
    names = [c.name for c in columns(8)]
    assert len(names) == len(set(names))
    assert set(names) == set(SlotView.__annotations__)


@pytest.mark.parametrize("writer", list(Writer))
def test_a_role_writes_its_own_columns_only(writer: Writer) -> None:
    table, _ = SlotTable.create(slots=4, max_req_total_len=8)
    view = table.view(writer)
    for column in columns(8):
        array = getattr(view, column.name)
        if column.writer is writer:
            array[1] = 1
            assert np.all(getattr(table.view(Writer.HTTP), column.name)[1] == 1)
        else:
            with pytest.raises(ValueError, match="read-only"):
                array[1] = 1
