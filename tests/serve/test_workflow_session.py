# SPDX-License-Identifier: Apache-2.0
"""A data set that a workflow made: it is trained on, looked into and served, with the workflow taken along."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from terarec.cli.inspect_data import describe_column, describe_dataset
from terarec.cli.inspect_model import describe_table
from terarec.errors import ConfigError
from terarec.formats import write_dataset
from terarec.formats.shard import create_shard, shard_path
from terarec.serve import InferenceSession, InputColumn
from terarec.spec import DLRMSpec, RunSpec, TrainingSpec
from terarec.train.predict import predict
from terarec.train.run import build
from tests.errors import at
from tests.etl.workflow.fitting import fit
from tests.etl.workflow.shop import raw, rows_of, shop


def write_shop(directory: Path, columns: dict[str, list[Any]], spill: Path) -> Path:
    block = rows_of(columns)
    workflow = fit(shop(), block, spill)
    spec = workflow.dataset_spec()
    workflow.save(directory / "workflow")
    shards = {}
    for split in ("train", "valid"):
        with create_shard(spec, shard_path(directory, spec, split, 0)) as writer:
            encoded = workflow.encode_rows(workflow.apply(block))
            writer.write(encoded.label, encoded.dense, encoded.keys)
            shards[split] = (writer.close(),)
    write_dataset(dataclasses.replace(spec, splits=shards), directory)
    return directory


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shop")
    write_shop(root / "data", raw(), root)
    run = RunSpec(
        data=str(root / "data"),
        model=DLRMSpec(width=4, bottom=(8, 4), top=(8,)),
        training=TrainingSpec(batch_size=64, epochs=2, reader_threads=1),
    )
    build(run, root / "run").fit()
    return root


def test_raw_records_score_as_prepared_ones_without_the_data(root: Path, tmp_path: Path) -> None:
    predict(root / "run", root / "data", "valid", tmp_path / "scores.parquet")
    predicted = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    shutil.copytree(root / "run", tmp_path / "run")  # with nothing next to it
    session = InferenceSession.open(tmp_path / "run")
    scores = session.predict(raw())
    np.testing.assert_allclose(scores[:, 0], predicted, atol=1e-6)
    assert predicted.std() > 1e-4
    assert session.inputs == (
        InputColumn(name="user", kind="integer"),
        InputColumn(name="price", kind="number"),
        InputColumn(name="brand", kind="string"),
        InputColumn(name="model", kind="string"),
        InputColumn(name="tags", kind="string", hotness=None),
    )
    with pytest.raises(ConfigError, check=at("column 'model', row 1")):
        session.predict({**raw(2), "model": ["a", "xyz"]})


def test_inspect_shows_the_values_of_ids(root: Path) -> None:
    described = {column["column"]: column for column in describe_dataset(root / "data")["columns"]}
    kinds = {name: column["step"] for name, column in described.items()}
    assert kinds == {
        "bought": None,
        "price": "normalize",
        "brand_rate": "target_encoding",
        "user_count": "join_groupby",
        "band": "bucketize",
        **dict.fromkeys(("brand", "kind", "user", "tags", "model"), "categorify"),
    }
    assert described["brand"]["missing_share"] > 0.1
    assert described["band"]["rare_share"] is None

    def values(name: str) -> set[str]:
        found = describe_column(root / "data", name, None, 100, lambda done, total: None)
        return {value["value"] for value in found["most_frequent"]}

    assert values("brand") == {"(missing)", "x", "\u00fc", "acme"}
    assert values("model") == {"(missing)", "0000000a", "0000000b", "0000000c"}
    assert values("tags") == {"t0", "t1", "t2"}
    assert all(value.startswith("[") and value.endswith(")") for value in values("band"))
    rows = describe_table(root / "run", "brand", 10)["largest"]
    assert {"x", "\u00fc", "acme"} <= {row["value"] for row in rows}


def test_a_workflow_that_was_fitted_again_is_another(root: Path, tmp_path: Path) -> None:
    columns = raw()
    columns["brand"] = [brand + "!" if brand else brand for brand in columns["brand"]]
    other = write_shop(tmp_path / "other", columns, tmp_path)
    with pytest.raises(ConfigError, check=at("data set 'shop'")):
        predict(root / "run", other, "valid", tmp_path / "scores.parquet")
