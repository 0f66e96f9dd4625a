# SPDX-License-Identifier: Apache-2.0
"""A rejected, failed or second training leaves the run as it was."""

import dataclasses
import shutil
from itertools import product

import numpy as np
import pytest

from terarec.config.files import save_run
from terarec.errors import ConfigError, FormatError, StorageError, TrainingError
from terarec.formats import read_dataset, write_dataset
from terarec.formats.parquet import ParquetShardWriter
from terarec.io.files import AtomicFile
from terarec.models.artifact import load_model
from terarec.models.trained_columns import check_missing_ids
from terarec.ragged import Ragged
from terarec.spec import (
    BinarySpec,
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    LabelColumn,
    RegressionSpec,
    RunSpec,
    SASRecSpec,
    SGDSpec,
    ShardSpec,
    TrainingSpec,
    TwoTowerSpec,
    WideDeepSpec,
)
from terarec.train import Callback, build, predict
from terarec.train.checkpointing import columns_read
from tests.errors import at
from tests.params import in_every_run
from tests.train.small_run import assert_same, changed, weights


def write_shops(directory, *, rows=6, hotness=1, vocabulary=b"a b c", workflow="workflow", positive=1.0):
    """Return a data set of one number and one id that a workflow made."""
    spec = DatasetSpec(
        name="shops",
        storage="parquet",
        labels=(LabelColumn(name="y"),),
        dense=(DenseColumn(name="x"),),
        categorical=(CategoricalColumn(name="shop", rows=rows, hotness=hotness),),
        splits={"train": (ShardSpec(file="train/part-00000.parquet", rows=60),)},
        workflow=workflow,
    )
    writer = ParquetShardWriter(directory / "train/part-00000.parquet", spec)
    keys = np.arange(60) % 5
    shops = keys if hotness == 1 else Ragged(keys, np.arange(61))
    writer.write((positive * (keys > 2)).astype(np.float32)[:, None], np.ones((60, 1), np.float32), [shops])
    writer.close()
    if workflow is not None:
        (directory / workflow).mkdir()
        (directory / workflow / "shop.parquet").write_bytes(vocabulary)
    write_dataset(spec, directory)
    return directory


def shops_run(data, out, **training):
    training = TrainingSpec(**{"batch_size": 30, "epochs": 1, **training})
    return build(RunSpec(data=str(data), model=WideDeepSpec(width=2, hidden=(4,)), training=training), out)


def test_a_misspelt_split_is_rejected_with_the_nearest_name(tmp_path, spec):
    """A13: it was taken as a data set without that split, and nothing was evaluated."""
    with pytest.raises(ConfigError, check=at("training.eval_split: data set 'planted'", "did you mean 'valid'")):
        build(changed(spec, eval_split="vlaid"), tmp_path / "RUN").fit()
    assert list(tmp_path.iterdir()) == []


def test_a_slice_of_no_column_is_rejected_before_the_first_step(tmp_path, spec):
    """Finding Q: the first evaluation found it, after an epoch, and left a run."""
    for name in ("nosuch", ""):
        with pytest.raises(ConfigError, check=at("training.slices", f"got {name!r}")):
            build(changed(spec, slices=(name,)), tmp_path / "RUN").fit()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_trains_nothing_is_rejected(tmp_path, spec):
    with pytest.raises(ConfigError, check=at("training.freeze", "got '*'")):
        build(changed(spec, freeze=("*",), max_steps=1), tmp_path / "RUN").fit()
    assert list(tmp_path.iterdir()) == []


def test_only_the_default_split_may_be_missing(tmp_path):
    """A13: a data set without "valid" trains without a word, as does a run that wants no evaluation."""
    data = write_shops(tmp_path / "data")
    assert shops_run(data, tmp_path / "RUN").fit().evaluation is None
    assert shops_run(data, tmp_path / "NONE", eval_split=None).fit().evaluation is None
    with pytest.raises(ConfigError, check=at("training.eval_split: data set 'shops'")):
        shops_run(data, tmp_path / "TEST", eval_split="test").fit()


def content(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("other", "column", "problem"),
    [
        ({"rows": 7}, ", column 'shop'", "7 rows, expected 6"),
        ({"hotness": 3}, ", column 'shop'", "6 rows in lists of 3"),
        ({"vocabulary": b"c b a"}, "", "workflow/shop.parquet"),
        ({"workflow": None}, "", "workflow/shop.parquet"),
    ],
)
def test_data_that_was_encoded_otherwise_is_rejected_and_the_run_stays(tmp_path, other, column, problem):
    data = write_shops(tmp_path / "data")
    shops_run(data, tmp_path / "RUN").fit()
    before = content(tmp_path / "RUN")
    strange = write_shops(tmp_path / "strange", **other)
    rejected = at(f"data set 'shops'{column}", problem)
    with pytest.raises(ConfigError, check=rejected):
        shops_run(strange, tmp_path / "RUN", epochs=2).fit(resume=True)
    with pytest.raises(ConfigError, check=rejected):
        predict(tmp_path / "RUN", strange, "train", tmp_path / "scores.parquet")
    assert content(tmp_path / "RUN") == before
    moved = shutil.move(data, tmp_path / "moved")
    assert shops_run(moved, tmp_path / "RUN", epochs=2).fit(resume=True).steps == 4
    assert predict(tmp_path / "RUN", moved, "train", tmp_path / "scores.parquet").rows == 60


def test_id_0_means_the_same_for_a_training_that_goes_on(tmp_path):
    """Nothing was said, and models of histories had other inputs from there on."""
    data = write_shops(tmp_path / "data", workflow=None)
    shops_run(data, tmp_path / "RUN").fit()
    columns = read_dataset(data)
    (shop,) = columns.categorical
    write_dataset(dataclasses.replace(columns, categorical=(dataclasses.replace(shop, given=False),)), data)
    rejected = at("data set 'shops', column 'shop'", "id 0 is a missing value, expected a value")
    with pytest.raises(ConfigError, check=rejected):
        shops_run(data, tmp_path / "RUN", epochs=2).fit(resume=True)
    warm = dataclasses.replace(shops_run(data, tmp_path / "NEW").spec, init_from=str(tmp_path / "RUN"))
    with pytest.raises(ConfigError, check=rejected):
        build(warm, tmp_path / "NEW").fit()
    assert predict(tmp_path / "RUN", data, "train", tmp_path / "scores.parquet").rows == 60


def test_id_0_may_mean_something_else_where_no_model_reads_it(tmp_path):
    """Finding Q: a training that went on was refused for columns that its model does not read."""
    columns = [CategoricalColumn(name=name, rows=6) for name in ("shop", "brand", "town")]
    known = DatasetSpec(
        name="d", storage="parquet", labels=(LabelColumn(name="y"),), dense=(), categorical=tuple(columns)
    )
    columns[1] = dataclasses.replace(columns[1], given=False)
    other = dataclasses.replace(known, categorical=tuple(columns))
    run = shops_run(write_shops(tmp_path / "data"), tmp_path / "RUN")
    assert "shop" in columns_read(run.model, run.spec.model)
    assert columns_read(run.model, SASRecSpec(item="town", history="brand")) >= {"shop", "brand", "town"}
    check_missing_ids(other, known, columns_read(run.model, run.spec.model))
    with pytest.raises(ConfigError, check=at("data set 'd', column 'brand'")):
        check_missing_ids(other, known, {"brand"})


def test_a_run_that_cannot_be_restored_keeps_its_description(tmp_path, spec):
    build(changed(spec, max_steps=1), tmp_path).fit()
    table = next(tmp_path.rglob("item-*.safetensors"))
    table.write_bytes(table.read_bytes()[::-1])
    before = content(tmp_path)
    with pytest.raises(FormatError, check=at(table)):
        build(changed(spec, max_steps=2), tmp_path).fit(resume=True)
    assert content(tmp_path) == before


def test_one_training_at_a_time(tmp_path, spec):
    errors = []

    class Second(Callback):
        def on_step(self, trainer):
            with pytest.raises(ConfigError, check=at(f"{tmp_path}/RUN")) as caught:
                build(spec, tmp_path / "RUN").fit(resume=trainer.step == 2)
            errors.append(caught.value)

    build(changed(spec, max_steps=2, checkpoint_every=1), tmp_path / "RUN", callbacks=[Second()]).fit()
    assert len(errors) == 2
    assert load_model(tmp_path / "RUN").step == 2
    assert not (tmp_path / "RUN/.lock").exists()


def test_the_lock_file_of_a_killed_training_does_not_block_others(tmp_path, spec):
    (tmp_path / ".lock").touch()
    assert build(changed(spec, max_steps=1), tmp_path).fit().steps == 1


def test_a_directory_of_something_else_is_rejected(tmp_path, spec):
    (tmp_path / "notes.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(ConfigError, check=at("out")):
            build(spec, tmp_path).fit(resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


class FailAtStart(Callback):
    def on_start(self, trainer):
        raise StorageError("no")


class PressAtStep1(Callback):
    def on_step(self, trainer):
        raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["new", "empty"])
def test_a_start_that_fails_before_its_first_step_leaves_nothing(tmp_path, spec, place):
    out = tmp_path / "RUN"
    if place == "empty":
        out.mkdir()
    with pytest.raises(StorageError):
        build(spec, out, callbacks=[FailAtStart()]).fit()
    assert [path.name for path in tmp_path.rglob("*")] == (["RUN"] if place == "empty" else [])


def test_a_run_stays_after_its_first_step_and_may_be_restarted(tmp_path, spec):
    """B3: a run was deleted, its log included, if it failed before its first checkpoint."""
    wild = dataclasses.replace(spec, dense_optimizer=SGDSpec(lr=1e30), sparse_optimizer=SGDSpec(lr=1e30))
    with pytest.raises(TrainingError):
        build(wild, tmp_path / "wild").fit()
    assert (tmp_path / "wild/metrics.jsonl").read_text()
    with pytest.raises(KeyboardInterrupt):
        build(spec, tmp_path / "pressed", callbacks=[PressAtStep1()]).fit()
    for name in ("wild", "pressed"):
        assert {path.name for path in (tmp_path / name).iterdir()} == {"run.json", "dataset", "metrics.jsonl"}
        assert build(changed(spec, max_steps=1), tmp_path / name).fit().steps == 1


@pytest.mark.parametrize(
    ("hook", "epoch"),
    in_every_run(
        [("on_evaluation", 1), ("on_step", 2), ("on_finish", 2)],
        product(["on_evaluation", "on_step", "on_epoch_end", "on_finish"], [1, 2]),
    ),
)
def test_an_error_of_a_callback_keeps_the_epoch(tmp_path, spec, hook, epoch):
    """B4: raising in on_evaluation, a common early stop, lost the epoch's checkpoint, or the whole first one."""

    class Stop(Exception):  # noqa: N818
        pass

    def stop(trainer, *_):
        if trainer.epoch == epoch:
            raise Stop

    callback = Callback()
    setattr(callback, hook, stop)
    with pytest.raises(Stop):
        build(changed(spec, epochs=epoch), tmp_path / "RUN", callbacks=[callback]).fit()
    assert load_model(tmp_path / "RUN").step == 8 * epoch
    straight, resumed = build(spec, tmp_path / "straight"), build(spec, tmp_path / "RUN")
    assert straight.fit().steps == resumed.fit(resume=True).steps
    assert_same(weights(resumed.model), weights(straight.model))


def test_an_evaluation_that_fails_keeps_the_epoch(tmp_path):
    """B3: labels that no metric takes ended the run after an epoch, and deleted it."""
    data = write_shops(tmp_path / "data", positive=2.0)
    numbers = shops_run(data, tmp_path / "RUN", eval_split="train", metrics=("auc",)).spec
    with pytest.raises(ConfigError, check=at("AUC.update")):
        build(dataclasses.replace(numbers, objective=RegressionSpec()), tmp_path / "RUN").fit()
    assert load_model(tmp_path / "RUN").step == 2


@pytest.mark.parametrize("model", [WideDeepSpec(width=2, hidden=(4,)), TwoTowerSpec(user=("x",), item=("shop",))])
@pytest.mark.parametrize("positive", [2.0, -1.0])
def test_labels_outside_0_to_1_are_rejected_before_the_first_step(tmp_path, positive, model):
    """An epoch was trained on them, and without an evaluation all epochs, whose loss falls without an end."""
    data = write_shops(tmp_path / "data", positive=positive)
    run = shops_run(data, tmp_path / "RUN", eval_split=None).spec
    with pytest.raises(ConfigError, check=at("label 'y'", f"got {positive:g}, expected 0 to 1")) as rejected:
        build(dataclasses.replace(run, model=model), tmp_path / "RUN").fit()
    # Another objective leaves the loss of the towers as it is.
    assert ("'regression'" in rejected.value.problem) == isinstance(model, WideDeepSpec)
    assert not (tmp_path / "RUN").exists()


def test_weights_that_a_loss_does_not_read_are_rejected_where_a_training_begins(tmp_path):
    """No run of an earlier version that had them could be read."""
    data = write_shops(tmp_path / "data")
    plain = dataclasses.replace(
        shops_run(data, tmp_path / "RUN").spec, model=TwoTowerSpec(user=("x",), item=("shop",)), objective=BinarySpec()
    )
    build(plain, tmp_path / "RUN").fit()
    weighted = dataclasses.replace(plain, objective=BinarySpec(positive_weight="auto"))
    save_run(weighted, tmp_path / "RUN/run.json")
    assert load_model(tmp_path / "RUN").step == 2
    more = dataclasses.replace(weighted.training, epochs=2)
    assert build(dataclasses.replace(weighted, training=more), tmp_path / "RUN").fit(resume=True).steps == 4
    with pytest.raises(ConfigError, check=at("RunSpec.objective", "for two_tower")):
        build(weighted, tmp_path / "NEW")


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """A step with a finite loss may leave them, and its checkpoint took the place of the last good one."""
    run = shops_run(write_shops(tmp_path / "data"), tmp_path / "RUN", checkpoint_every=1).spec
    with pytest.raises(TrainingError, check=at("step 1 (epoch 1)", "weights that are not finite")):
        build(dataclasses.replace(run, dense_optimizer=SGDSpec(lr=1e39)), tmp_path / "RUN").fit()
    assert not list((tmp_path / "RUN").glob("checkpoints/*"))


def test_an_epoch_without_a_loss_is_reported(tmp_path, caplog):
    data = write_shops(tmp_path / "data", positive=0.0)
    run = shops_run(data, tmp_path / "RUN", eval_split=None).spec
    build(dataclasses.replace(run, model=TwoTowerSpec(user=("x",), item=("shop",))), tmp_path / "RUN").fit()
    assert [text.partition(":")[0] for text in caplog.messages] == ["nothing was learned in epoch 1"]


def test_a_killed_start_may_be_restarted(tmp_path, spec):
    run = build(spec, tmp_path)
    run.directory.begin(run.spec, run.dataset)
    AtomicFile(tmp_path / "run.json").partial.touch()
    assert build(changed(spec, max_steps=1, seed=9), tmp_path).fit().steps == 1
    assert load_model(tmp_path).spec.training.seed == 9
