from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.host.uploads import upload_rows

CPU = torch.device("cpu")


@given(st.lists(st.lists(st.integers(-5, 5), max_size=9), min_size=1, max_size=4))
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_rows_arrive_whole_and_begin_alike(dtype: type, rows: list[list[int]]) -> None:
    arrived = upload_rows(rows, dtype, CPU)
    assert [row.tolist() for row in arrived] == rows
    starts = [row.storage_offset() * row.element_size() for row in arrived]
    assert all(start % 16 == 0 for start in starts)
