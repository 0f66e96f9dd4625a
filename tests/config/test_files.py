# SPDX-License-Identifier: Apache-2.0

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.config import load_run, save_run
from terarec.config.files import load_served_tables
from terarec.errors import ConfigError, DataNotFoundError
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    CacheSpec,
    DLRMSpec,
    HostMemorySpec,
    OverflowSpec,
    RowFileSpec,
    RowWiseAdaGradSpec,
    RunSpec,
    ServedTablesSpec,
    SGDSpec,
    TrainingSpec,
    WideDeepSpec,
)
from tests.errors import at
from tests.params import examples

counts = st.integers(1, 1024)
widths = st.lists(st.integers(1, 4096), min_size=1, max_size=4).map(tuple)
rates = st.floats(0, 10, allow_nan=False)
models = st.one_of(
    widths.flatmap(lambda bottom: st.builds(DLRMSpec, width=st.just(bottom[-1]), bottom=st.just(bottom), top=widths)),
    st.builds(WideDeepSpec, width=counts, hidden=widths, dropout=st.floats(0, 0.95)),
)
dense_optimizers = st.one_of(st.builds(SGDSpec, lr=rates), st.builds(AdaGradSpec, lr=rates, eps=rates))
sparse_optimizers = st.one_of(dense_optimizers, st.builds(AdamSpec, lr=rates), st.builds(RowWiseAdaGradSpec, lr=rates))
trainings = st.builds(
    TrainingSpec,
    batch_size=counts,
    epochs=counts,
    max_steps=st.none() | counts,
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16"]),
    threads=st.none() | counts,
)
paths = st.text("abcXYZ 01.-_\u00e9", min_size=1).map(lambda text: os.path.normpath("/data/" + text))
runs = st.builds(
    RunSpec,
    data=paths,
    model=models,
    dense_optimizer=dense_optimizers,
    sparse_optimizer=sparse_optimizers,
    training=trainings,
)


@given(run=runs)
@settings(max_examples=examples(60))
def test_what_is_saved_is_loaded(run: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("run") / "run.json"
    save_run(run, path)
    assert load_run(path) == run
    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]


def _write(folder: Path, text: str) -> Path:
    path = folder / "config.json"
    path.write_text(text)
    return path


def test_relative_data_is_taken_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    _write(tmp_path / "configs", '{"data": "../data/criteo"}')
    monkeypatch.chdir(tmp_path)
    assert load_run("configs/config.json").data == str(tmp_path / "data" / "criteo")


def test_shipped_example_is_a_run() -> None:
    example = Path(__file__).parents[2] / "examples" / "train_config.json"
    assert load_run(example).model == DLRMSpec(width=16, bottom=(64, 32, 16), top=(256, 128))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"data": "d",\n "model": }', "line 2 column 11"),
        ('{"data": "d", "data": "e"}', "$.data: the field occurs twice"),
        ('{"data": "d", "training": {"seed": 1, "seed": 2}}', "$.training.seed: the field occurs twice"),
        ('{"model": {"top": [1, {"a": 1, "a": 1}]}}', "$.model.top[1].a: the field occurs twice"),
        ("[" * 700 + '{"a": 1, "a": 1}' + "]" * 700, "[0][0].a: the field occurs twice"),
        ("[" * 100_000, "expected a run description in JSON"),
        ('{"data": 1' + "0" * 5000 + "}", "expected a run description in JSON"),
        ('{"data": "d", "training": {"batchsize": 1}}', "$.training.batchsize: unknown field (did you mean 'batch_s"),
        ('{"data": "d", "training": {"batch_size": "1"}}', "$.training.batch_size: got '1', expected an integer"),
        ('{"data": "d", "training": {"batch_size": true}}', "$.training.batch_size: got true, expected an integer"),
        ('{"data": "d", "training": {"batch_size": 0}}', "$.training.batch_size: got 0, expected an integer >= 1"),
        (
            '{"data": "d", "model": {"kind": "dlmr"}}',
            "$.model.kind: got 'dlmr' (did you mean 'dlrm'?), expected one of",
        ),
        ('{"data": "d", "model": {"kind": "dlrm", "top": [8, 1.5]}}', "$.model.top[1]: got 1.5, expected an integer"),
        ('{"data": "d", "dense_optimizer": {"kind": "sgd", "lr": NaN}}', "lr: got nan, expected a number"),
        ("{}", "$: field 'data' is missing"),
        ("[]", "$: got [], expected an object"),
    ],
)
def test_a_wrong_file_is_reported_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_directory_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/none.json")):
        load_run(tmp_path / "none.json")
    with pytest.raises(ConfigError, check=at(tmp_path)):
        load_run(tmp_path)
    (tmp_path / "binary.json").write_bytes(b'{"data": "\xff"}')
    with pytest.raises(ConfigError, check=at(f"{tmp_path}/binary.json")):
        load_run(tmp_path / "binary.json")


def test_saving_into_a_missing_folder_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save_run(RunSpec(data="d"), tmp_path / "none" / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_a_saved_file_is_plain_json(tmp_path: Path) -> None:
    save_run(RunSpec(data="/d"), tmp_path / "run.json")
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["model"]["kind"] == "dlrm"
    assert "max_steps" not in data["training"]


def test_tiers_of_served_tables_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    path.write_text(
        """{
        // paths count from this folder
        "tiers": [{"kind": "host", "overflow": {"max_rows": 5, "evict": "lru"}}, {"kind": "row_file", "path": "rows"}],
        "cache": {"form": "int8", "share": 0.1},
        "follow_seconds": 2
        }"""
    )
    assert load_served_tables(path) == ServedTablesSpec(
        tiers=(
            HostMemorySpec(overflow=OverflowSpec(max_rows=5, evict="lru")),
            RowFileSpec(path=str(tmp_path / "rows")),
        ),
        cache=CacheSpec(form="int8", share=0.1),
        follow_seconds=2.0,
    )


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"tiers": [{"kind": "disk"}]}', "$.tiers[0].kind"),
        ('{"tiers": [{"kind": "redis", "adress": "a:1"}]}', "$.tiers[0].adress"),
        ('{"tiers": [{"kind": "redis", "address": "a"}]}', "$.tiers[0].address"),
        ('{"tiers": [{"kind": "row_file"}]}', "$.tiers[0]"),
        ('{"cache": {"share": 2}}', "$.cache.share"),
        ('{"tiers": []}', "$.tiers"),
        ('{"follow_seconds": 0}', "$.follow_seconds"),
    ],
)
def test_wrong_tiers_are_named_by_their_path(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "tables.json"
    path.write_text(text)
    with pytest.raises(ConfigError, check=at(f"{path}: {where}")):
        load_served_tables(path)
