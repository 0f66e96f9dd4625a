"""Vectors of a table in files of other libraries."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from terarec.errors import ConfigError
from terarec.export import export_table
from terarec.models.artifact import load_model, tables
from tests.cli.conftest import Workshop
from tests.errors import at


@pytest.mark.parametrize("kind", ["parquet", "npy", "faiss"])
def test_the_vectors_are_those_of_the_table(workshop: Workshop, tmp_path: Path, kind: str) -> None:
    if kind == "faiss":
        faiss = pytest.importorskip("faiss")
    table = tables(load_model(workshop.run).model)["C3"]
    expected = table.export(table.keys())
    report = export_table(workshop.run, "C3", tmp_path / "out", format=kind)
    assert (report.rows, report.width, report.max_abs_difference) == (len(table), table.width, 0.0)
    if kind == "parquet":
        found = pq.read_table(report.file)
        keys, vectors = found["key"].to_numpy(), np.stack(found["vector"].to_numpy())
    elif kind == "npy":
        keys, vectors = np.load(report.file.parent / "keys.npy"), np.load(report.file)
    else:
        index = faiss.read_index(str(report.file))
        keys = faiss.vector_to_array(index.id_map)
        vectors = index.index.reconstruct_n(0, index.ntotal)
    order = np.argsort(keys)
    assert np.array_equal(keys[order], expected.keys.sort().values.numpy())
    assert np.array_equal(vectors[order], expected.weights[expected.keys.argsort()].numpy())


def test_an_unknown_table_is_rejected(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=at("table")):
        export_table(workshop.run, "C99", tmp_path / "out")
    assert not (tmp_path / "out").exists()
