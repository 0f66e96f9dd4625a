"""The k-th smallest of many numbers."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from terarec.etl.engine import order_statistics
from terarec.etl.engine.order_statistics import OrderStatistics


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=60), st.data())
def test_it_is_what_sorting_gives(tmp_path: Path, values: list[float], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(values) - 1))
    with OrderStatistics(tmp_path / "numbers") as numbers:
        for start in range(0, len(values), 7):
            numbers.add(np.array(values[start : start + 7]))
        assert numbers.count == len(values)
        assert numbers.at(rank) == sorted(values)[rank]
    assert not (tmp_path / "numbers").exists()


def test_more_numbers_than_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_statistics, "_CHUNK", 10)
    values = np.random.default_rng(0).normal(size=1000)
    with OrderStatistics(tmp_path / "numbers") as numbers:
        numbers.add(values)
        assert [numbers.at(rank) for rank in (0, 500, 999)] == np.sort(values)[[0, 500, 999]].tolist()
