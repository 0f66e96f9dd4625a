# SPDX-License-Identifier: Apache-2.0
"""A facade's model as a RUN: training that goes on from it equals training without a stop, and the CLI takes it."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch

import terarec.hugectr as hugectr
from terarec.config import load_run, save_run
from terarec.hugectr.errors import IllegalCallError, WrongInputError
from terarec.metrics import AUC
from terarec.models.artifact import load_model
from terarec.serve import InferenceSession
from terarec.train import Run
from tests.cli.conftest import figures
from tests.errors import at
from tests.hugectr import families
from tests.hugectr.planted import ROWS, Planted, write_norm, write_raw_async
from tests.hugectr.scripts import ADAM, dcn, embed, model
from tests.hugectr.test_older_releases import write_parquet, write_raw
from tests.params import in_every_run

HALF = 13
SCHEDULE = {"warmup_steps": 6, "decay_start": 10, "decay_steps": 30}
ONE_HOT = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingOneHot
ADAGRAD = {"optimizer_type": hugectr.Optimizer_t.AdaGrad, "update_type": hugectr.Update_t.Local}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Small training and evaluation data in every format."""
    folder, train, valid = tmp_path_factory.mktemp("files"), Planted(4_000), Planted(1_000, seed=1)
    return {
        "norm": (write_norm(folder / "norm", train), write_norm(folder / "norm_valid", valid)),
        "parquet": (write_parquet(folder / "parquet", train), write_parquet(folder / "parquet_valid", valid)),
        "raw": (write_raw(folder / "train.bin", train), write_raw(folder / "valid.bin", valid)),
        "raw_async": (write_raw_async(folder / "a.bin", train), write_raw_async(folder / "b.bin", valid)),
    }


def reader(kind, sources, **changes):
    return hugectr.DataReaderParams(
        data_reader_type=kind, source=sources[0], eval_source=sources[1], slot_size_array=[ROWS] * 4, **changes
    )


def of_norm(files, **settings):
    return dcn(*files["norm"], **settings)


def of_two_inputs(files, **settings):
    return families.wide_deep(*files["norm"], optimizer=ADAGRAD, **settings)


def of_parquet(files, **settings):
    data = reader(hugectr.DataReaderType_t.Parquet, files["parquet"])
    made = model("", "", reader=data, optimizer={"optimizer_type": hugectr.Optimizer_t.Ftrl}, **settings)
    embed(made, "embedding", 8, kind=families.LOCALIZED)
    return families.dlrm(made)


def of_raw(files, **settings):
    data = reader(
        hugectr.DataReaderType_t.Raw, files["raw"], num_samples=4_000, eval_num_samples=1_000, float_label_dense=True
    )
    made = model("", "", reader=data, optimizer=ADAM, **{"i64_input_key": False, **settings})
    embed(made, "embedding", 8, kind=ONE_HOT, slot_size_array=[ROWS] * 4)
    return families.dlrm(made)


def of_shuffled(files, **settings):
    """RawAsync in another order each time, over static tables of an embedding collection."""
    data = families.raw_async_reader(*files["raw_async"], 4_000, 1_000)
    data = data.with_values(async_param=hugectr.AsyncParam(2, 4, shuffle=True, multi_hot_reader=True))
    return families.collection_dlrm(data, optimizer=ADAM, **settings)


MODELS = {function.__name__: function for function in (of_norm, of_two_inputs, of_parquet, of_raw, of_shuffled)}


def everything(net, optimizers):
    """All numbers of a training: weights, rows, and both kinds of optimizer states."""
    states = [optimizers.dense.state_dict()["state"], optimizers.rows.state_dict()["state"]]
    return dict(flat({"weights": dict(net.state_dict()), "states": states}))


def flat(value, path=""):
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(item, f"{path}.{key}")
    else:
        yield path, torch.as_tensor(value)


@pytest.mark.parametrize("name", in_every_run(list(MODELS)[::2], MODELS))
def test_training_that_resumes_equals_training_without_a_stop(files, tmp_path, name):
    whole = MODELS[name](files, **SCHEDULE, batchsize=300)
    whole.fit(max_iter=2 * HALF, display=0, eval_interval=0)
    half = MODELS[name](files, **SCHEDULE, batchsize=300)  # compiling seeds torch's generator, that of dropout
    half.fit(max_iter=HALF, display=0, eval_interval=0)
    half.save_run(tmp_path / "run")
    spec = load_run(tmp_path / "run" / "run.json")
    longer = dataclasses.replace(spec, training=dataclasses.replace(spec.training, max_steps=2 * HALF))
    run = Run(longer, tmp_path / "run")
    report = run.fit(resume=True)
    assert (report.steps, report.samples) == (2 * HALF, HALF * 300)
    made = whole._compiled("test")
    expected, found = everything(whole.module, made.trainer.optimizers), everything(run.model, run.trainer.optimizers)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert report.evaluation.rows == 1_000


def test_epochs_resume_too(files, tmp_path):
    whole = of_norm(files, repeat_dataset=False, batchsize=300)
    whole.fit(num_epochs=2, display=0, eval_interval=0)
    half = of_norm(files, repeat_dataset=False, batchsize=300)
    half.fit(num_epochs=1, display=0, eval_interval=0)
    half.save_run(tmp_path / "run")
    spec = load_run(tmp_path / "run" / "run.json")
    run = Run(dataclasses.replace(spec, training=dataclasses.replace(spec.training, epochs=2)), tmp_path / "run")
    assert run.fit(resume=True).steps == 26
    made = whole._compiled("test")
    expected, found = everything(whole.module, made.trainer.optimizers), everything(run.model, run.trainer.optimizers)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.fixture(scope="module")
def saved(files, tmp_path_factory):
    """A model that was trained in a loop of its own, and its RUN."""
    made, path = of_raw(files, batchsize=250), tmp_path_factory.mktemp("runs") / "run"
    made.start_data_reading()
    for _ in range(30):
        assert made.train()
    made.save_run(path)
    return made, path


def predictions(made, batches):
    """Probabilities and labels of the first evaluation batches."""
    made.get_data_reader_eval().set_source()
    scores, labels = [], []
    for _ in range(batches):
        assert made.eval()
        scores.append(made.check_out_tensor("logit", hugectr.Tensor_t.Evaluate)[:, 0])
        labels.append(made.check_out_tensor("label", hugectr.Tensor_t.Evaluate)[:, 0])
    made.get_eval_metrics()
    return np.concatenate(scores), np.concatenate(labels)


def test_the_commands_take_it(saved, tmp_path):
    made, path = saved
    scores, labels = predictions(made, 2)
    reported = figures("evaluate", path, "--data", path / "records.json")
    assert reported["step"] == 30
    assert reported["auc"] == pytest.approx(AUC().update(scores, labels).compute(), abs=1e-6)
    out = tmp_path / "scores.parquet"
    assert figures("predict", path, "--data", path / "records.json", "--split", "valid", "--out", out)["rows"] == 1_000
    assert figures("inspect", path)["step"] == 30


def test_a_session_serves_the_predictions_of_the_model(saved):
    made, path = saved
    scores, _ = predictions(made, 1)
    batch = made._compiled("test").evaluation.batch
    keys = batch.sparse.keys.view(4, -1).tolist()
    record = {f"dense.{number}": column.tolist() for number, column in enumerate(batch.dense.T)}
    record |= {f"data.{slot}": ids for slot, ids in enumerate(keys)}
    found = InferenceSession.open(path).predict(record)
    np.testing.assert_allclose(found[:, 0], scores, atol=1e-6)


@pytest.mark.slow  # test_onnx and tests of exports hold its parts
def test_a_run_is_exported(saved, tmp_path):
    pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
    _, path = saved
    reported = figures("export", path, "--out", tmp_path / "onnx")
    assert reported["max_abs_difference"] < 1e-5


def test_training_resumes_from_the_command_line(saved):
    _, path = saved
    spec = load_run(path / "run.json")
    assert (spec.training.repeat, spec.training.max_steps) == (True, 30)
    reported = figures("train", "--resume", "--out", path, "--set", "training.max_steps=33")
    assert reported["steps"] == 33
    assert load_model(path).step == 33


def test_what_cannot_become_a_run_is_rejected(files, saved, tmp_path):
    made, path = saved
    with pytest.raises(WrongInputError, check=at(f"save_run: {path}")):
        made.save_run(path)
    extending = tmp_path / "extending"
    shutil.copytree(path, extending)
    spec = load_run(path / "run.json")
    chain = path / "checkpoints" / f"step-{load_model(path).step:08d}"
    save_run(dataclasses.replace(spec, init_from=str(chain), extend_chain=True), extending / "run.json")
    with pytest.raises(WrongInputError, check=at(f"save_run: {extending}")):
        made.save_run(extending)
    shutil.rmtree(extending)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(WrongInputError, check=at("save_run: out")):
        made.save_run(tmp_path)
    with pytest.raises(IllegalCallError, check=at("save_run")):
        model(*files["norm"]).save_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
