# SPDX-License-Identifier: Apache-2.0
"""Vectors of a table in files of other libraries."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from terarec.errors import ConfigError
from terarec.export import export_embeddings, export_table
from terarec.models.artifact import load_model, tables
from terarec.spec import DLRMSpec, RunSpec, StaticTablesSpec, Tiers, TrainingSpec
from terarec.train.run import build
from tests.cli.conftest import Workshop, figures
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


def test_all_tables_go_into_directories_of_their_own(workshop: Workshop, tmp_path: Path) -> None:
    reported = figures("export", workshop.run, "--out", tmp_path / "out", "--to", "embeddings")
    held = tables(load_model(workshop.run).model)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(held)
    assert (reported["rows"], reported["max_abs_difference"]) == (sum(map(len, held.values())), 0.0)
    for name, table in held.items():
        found = pq.read_table(tmp_path / "out" / name / "vectors.parquet")
        keys, vectors = found["key"].to_numpy(), np.stack(found["vector"].to_numpy())
        expected = table.export(table.keys())
        assert np.array_equal(vectors[np.argsort(keys)], expected.weights[expected.keys.argsort()].numpy())
    assert sum(report["rows"] for report in reported["tables"]) == reported["rows"]


def test_nothing_is_left_of_an_export_that_fails(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=at("format")):
        export_embeddings(workshop.run, tmp_path / "out", format="csv")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_rows_that_training_has_not_changed_are_written(workshop: Workshop, tmp_path: Path) -> None:
    """A checkpoint of tables in tiers leaves them out."""
    spec = RunSpec(
        data=str(workshop.data),
        model=DLRMSpec(
            width=4,
            bottom=(8, 4),
            top=(8,),
            tables=StaticTablesSpec(tiers=Tiers(host="1MiB", file=str(tmp_path / "tiers"))),
        ),
        training=TrainingSpec(batch_size=64, max_steps=1, reader_threads=1),
    )
    build(spec, tmp_path / "run").fit()
    table = tables(load_model(tmp_path / "run").model)["C3"]
    expected = table.export(torch.arange(len(table))).weights.numpy()
    report = export_table(tmp_path / "run", "C3", tmp_path / "out")
    assert report.rows == len(table)
    found = pq.read_table(report.file)
    order = np.argsort(found["key"].to_numpy())
    assert np.array_equal(np.stack(found["vector"].to_numpy())[order], expected)
    figures("inspect", tmp_path / "run", "--export-table", "C3", "--out", tmp_path / "rows.parquet")
    with_states = pq.read_table(tmp_path / "rows.parquet")
    assert with_states.select(["key", "vector"]) == found
    states = [name for name in with_states.column_names if name not in ("key", "vector")]
    assert states
    assert 0 < with_states[states[0]].null_count < len(table)
