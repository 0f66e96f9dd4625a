# SPDX-License-Identifier: Apache-2.0
"""Workflows whose steps are fitted: phase after phase, kept on the disk, and the same for blocks and records."""

import dataclasses
import errno
import itertools
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terarec.errors import ConfigError, DataNotFoundError, StorageError
from terarec.etl.ops import Categorify, DropLowCardinality, History, Normalize
from terarec.etl.ops.states import SpillOptions
from terarec.etl.workflow import Workflow
from terarec.etl.workflow import workflow as workflow_module
from terarec.etl.workflow.workflow import save_states
from terarec.formats.dataset import workflow_files
from terarec.io.removal import MARKER
from terarec.spec import LabelSpec
from tests.errors import at
from tests.etl.workflow.fitting import fit
from tests.etl.workflow.shop import SOURCE, raw, rows_of, shop


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(found.dense, wanted.dense)
    for keys, others in zip(found.keys, wanted.keys, strict=True):
        for part, other in zip(*(k if isinstance(k, tuple) else (k,) for k in (keys, others)), strict=True):
            np.testing.assert_array_equal(part, other)


def test_steps_are_fitted_after_those_that_they_read() -> None:
    plan = shop().plan
    assert plan.fit_phases == ((0, 6, 7, 8), (1,), (2,), (3,))
    assert plan.fit_pass(0).reads == ("user", "price", "brand", "model", "tags", "bought")
    assert plan.fit_pass(2).reads == ("price", "bought")
    assert plan.fit_pass(2).steps == (0, 1)
    assert plan.fit_pass(2).observes == (2,)


def test_a_loaded_model_equals_the_saved_one(tmp_path: Path) -> None:
    block = rows_of(raw())
    made = fit(shop(), block, tmp_path)
    made.save(tmp_path / "workflow")
    loaded = Workflow.load(tmp_path / "workflow")
    assert loaded.is_fitted
    assert loaded.dataset_spec() == made.dataset_spec()
    same(loaded.encode_rows(loaded.apply(block)), made.encode_rows(made.apply(block)))
    for column in made.dataset_spec().categorical:
        assert column.rows is not None
    (tmp_path / "workflow" / "states" / "01-log_op.json").unlink()
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/workflow/states/01-log_op.json")):
        Workflow.load(tmp_path / "workflow")


def test_a_save_leaves_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    """A workflow was fitted by the states of another that was saved there before."""
    fitted, place = fit(shop(), rows_of(raw()), tmp_path / "fitting"), tmp_path / "w"
    fitted.earlier_rows = tmp_path / "rows"
    fitted.earlier_rows.mkdir()
    (fitted.earlier_rows / "01.parquet").write_bytes(b"rows")
    (tmp_path / "w").mkdir()
    (place / "notes.txt").write_text("of somebody else")
    fitted.save(place)
    again = Workflow.load(place)
    again.save(place)  # over what it was read from
    assert (place / "earlier_rows" / "01.parquet").read_bytes() == b"rows"
    assert Workflow.load(place).is_fitted
    shop().save(place)
    assert sorted(path.name for path in place.iterdir()) == ["notes.txt", "workflow.json"]
    assert not Workflow.load(place).is_fitted
    fitted.save(place)
    (place / "states" / "notes.txt").write_text("of somebody else")
    with pytest.raises(ConfigError, check=at(place / "states")):
        shop().save(place)
    assert Workflow.load(place).is_fitted


def test_a_save_that_fails_or_is_killed_keeps_the_former_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding Q: on a full disk no workflow was left, nor after a kill between the renames, but for parts of two."""
    fitted, place, replace = fit(shop(), rows_of(raw()), tmp_path / "fitting"), tmp_path / "w", os.replace
    fitted.save(place)
    former = files_in(place)
    shop().save(tmp_path / "other")
    copies: list[Path] = []

    def kept(source: Path, target: Path) -> None:
        replace(source, target)
        copies.append(tmp_path / f"killed{len(copies)}")  # what a kill leaves here
        shutil.copytree(place, copies[-1])

    def full(source: Path, target: Path) -> None:
        if Path(target) in faults:
            faults.clear()
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        replace(source, target)

    for name, workflow in (("workflow.json", shop()), ("states", fitted)):
        faults = {place / name}
        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(StorageError, check=at(place)):
            workflow.save(place)
        assert files_in(place) == former
    monkeypatch.setattr(os, "replace", kept)
    shop().save(place)
    monkeypatch.undo()
    assert sorted(files_in(place)) == ["workflow.json"]
    assert [(copy / "workflow.json").exists() for copy in copies] == [True, False, False, True, True]
    spec = dataclasses.replace(fitted.dataset_spec(), workflow=".")
    for copy, ends_by in itertools.product(copies, (Workflow.load, partial(workflow_files, spec), fitted.save)):
        shutil.copytree(copy, tmp_path / "copy")
        ends_by(tmp_path / "copy")
        if ends_by == fitted.save:
            assert files_in(tmp_path / "copy") == former
        else:
            is_former = copy == copies[0]
            assert Workflow.load(tmp_path / "copy").is_fitted is is_former
            assert workflow_files(spec, tmp_path / "copy") == tuple(sorted(former) if is_former else ["workflow.json"])
        shutil.rmtree(tmp_path / "copy")


def test_a_save_that_cannot_be_undone_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding Q: after a disk that failed twice, the former workflow was removed with the files of the new one."""
    fitted, place, replace = fit(shop(), rows_of(raw()), tmp_path / "fitting"), tmp_path / "w", os.replace
    fitted.save(place)
    former = files_in(place)

    def broken(source: Path, target: Path) -> None:
        if place / "workflow.json" in (Path(source), Path(target)) and Path(target).parent.name != ".terarec-former":
            raise OSError(errno.EIO, "Input/output error", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(StorageError, check=at(place)):
        fitted.save(place)
    with pytest.raises(StorageError, check=at(place, "a save was interrupted")):
        Workflow.load(place)
    monkeypatch.undo()
    assert Workflow.load(place).is_fitted
    assert files_in(place) == former


def test_saves_to_one_directory_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later one removed what the earlier one was about to move into its place."""
    fitted, place = fit(shop(), rows_of(raw()), tmp_path / "fitting"), tmp_path / "w"
    others: list[Future[None]] = []
    with ThreadPoolExecutor(1) as pool:

        def written(*args: Any) -> None:
            save_states(*args)
            if not others:
                others.append(pool.submit(shop().save, place))
                time.sleep(0.2)

        monkeypatch.setattr(workflow_module, "save_states", written)
        fitted.save(place)
        others[0].result()
    assert sorted(path.name for path in place.iterdir()) == ["workflow.json"]
    assert not Workflow.load(place).is_fitted


def test_what_a_workflow_does_not_take_the_place_of(tmp_path: Path) -> None:
    """A folder behind a link lost its workflow, and one whose removal was killed was never saved to again."""
    place, elsewhere = tmp_path / "w", tmp_path / "elsewhere"
    shop().save(place)
    former = files_in(place)
    elsewhere.mkdir()
    for folder in ("states", "earlier_rows"):
        (place / folder).symlink_to(elsewhere)
        with pytest.raises(ConfigError, check=at(place / folder)):
            shop().save(place)
        (place / folder).unlink()
        assert files_in(place) == former
    (place / "states").mkdir()
    (place / "states" / MARKER).touch()
    (place / "states" / "part").touch()
    shop().save(place)
    assert files_in(place) == former
    (place / "workflow.json").unlink()
    (place / "workflow.json").mkdir()
    with pytest.raises(ConfigError, check=at("out")):
        shop().save(place)


def files_in(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_records_get_what_rows_outside_the_training_part_get(tmp_path: Path) -> None:
    made = fit(shop(), rows_of(raw()), tmp_path)
    assert set(made.record_columns) == {"user", "price", "brand", "model", "tags"}
    others = raw(40)
    others["brand"][:2] = ["never seen", None]
    others["price"][:2] = [-5.0, 1e6]
    same(made.encode(others), made.encode_rows(made.apply(rows_of(others))))


def test_training_rows_do_not_see_their_own_target(tmp_path: Path) -> None:
    block = rows_of(raw())
    made = fit(shop(), block.with_split(np.zeros(block.num_rows, dtype=np.uint8)), tmp_path)
    trained = made.apply(block.with_split(np.zeros(block.num_rows, dtype=np.uint8))).columns["brand_rate"]
    served = made.apply(block).columns["brand_rate"]
    assert not trained.equals(served)


def test_what_was_not_fitted_is_reported() -> None:
    assert not shop().is_fitted
    with pytest.raises(ConfigError, check=at("steps[0] FillMissing")):
        shop().apply(rows_of(raw(3)))
    for work in (lambda: shop().encode({}), lambda: shop().dataset_spec()):
        with pytest.raises(ConfigError, check=at("workflow 'shop'")):
            work()


def test_dropped_columns_are_not_results(tmp_path: Path) -> None:
    made = Workflow(
        [Categorify(columns=("brand", "model")), DropLowCardinality(columns=("brand", "model"), min_distinct=3)],
        source=SOURCE,
        labels=[LabelSpec(name="bought")],
        categorical=["brand", "model"],
    )
    columns = {**raw(), "model": ["a", "b"] * 150}
    fit(made, rows_of(columns), tmp_path)
    assert [column.name for column in made.dataset_spec().categorical] == ["brand"]
    assert set(made.record_columns) == {"brand", "model"}  # one step makes both
    assert len(made.encode(columns).keys) == 1


def test_a_record_brings_its_history(tmp_path: Path) -> None:
    made = Workflow(
        [
            History(columns=("brand",), group="user", order="price", max_length=3, outputs=("seen",)),
            Categorify(columns=("brand",), outputs=("brand_id",)),
            Categorify(columns=("seen",)),
        ],
        source=SOURCE,
        labels=[LabelSpec(name="bought")],
        categorical=["brand_id", "seen"],
    )
    assert made.plan.grouped_steps == (0,)
    assert made.plan.grouped_pass().reads == ("user", "price", "brand", "bought")
    block = made.apply(rows_of(raw()), upto=1)
    for step in (1, 2):
        code = made.plan.operators[step]
        statistic = code.statistic(made.plan.types[step], SpillOptions(directory=tmp_path))
        statistic.merge(statistic.observe(block))
        made.states[step] = statistic.finish()
    encoded = made.encode({"brand": ["x", None], "seen": [["acme", "x"], None]})
    values, offsets = encoded.keys[1]
    assert offsets.tolist() == [0, 2, 2]
    assert values[1] == encoded.keys[0][0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("steps", "where"),
    [
        (
            [Categorify(columns=("brand",)), History(columns=("model",), group="user", order="price", max_length=3)],
            "steps[0] Categorify",
        ),
        (
            [Normalize(columns=("price",)), DropLowCardinality(columns=("brand",))],
            "steps[1] DropLowCardinality",
        ),
    ],
)
def test_orders_that_cannot_be(steps: list[Any], where: str) -> None:
    with pytest.raises(ConfigError, check=at(where)):
        Workflow(steps, source=SOURCE, labels=[LabelSpec(name="bought")], dense=["price"])


def test_a_data_set_says_how_many_ids_rare_values_have(tmp_path: Path) -> None:
    """Models took all but the first for items, and drew negatives from a catalogue of one."""
    several, one = Categorify(columns=("brand",), hash_buckets=3), Categorify(columns=("user",))
    workflow = Workflow([several, one], source=SOURCE, labels=[LabelSpec(name="bought")], categorical=["brand", "user"])
    fit(workflow, rows_of(raw()), tmp_path)
    found = {column.name: column.rare_ids for column in workflow.dataset_spec().categorical}
    assert found == {"brand": 3, "user": None}
