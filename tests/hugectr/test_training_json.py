# SPDX-License-Identifier: Apache-2.0
"""Training files of 2.3 and 3.0 become the objects that a script would have made."""

import json

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.enums import MetricsType, Optimizer_t, Update_t
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.training_json import SolverParser, get_learning_rate_scheduler, read_training
from tests.errors import at

SOLVER = {
    "lr_policy": "fixed",
    "display": 10,
    "max_iter": 30,
    "gpu": [0, 1],
    "batchsize": 8,
    "snapshot": 100,
    "snapshot_prefix": "./",
    "eval_interval": 5,
    "max_eval_batches": 3,
}
DATA = {
    "name": "data",
    "type": "Data",
    "source": "train.txt",
    "eval_source": "val.txt",
    "check": "Sum",
    "label": {"top": "label", "label_dim": 1},
    "dense": {"top": "dense", "dense_dim": 3},
    "sparse": [
        {"top": "wide", "type": "DistributedSlot", "max_feature_num_per_sample": 30, "slot_num": 1},
        {"top": "deep", "type": "LocalizedSlot", "max_feature_num_per_sample": 30, "max_nnz": 2, "slot_num": 3},
    ],
}
EMBEDDING = {
    "name": "e",
    "type": "LocalizedSlotSparseEmbeddingHash",
    "bottom": "deep",
    "top": "vectors",
    "sparse_embedding_hparam": {"max_vocabulary_size_per_gpu": 50, "embedding_vec_size": 4, "combiner": 1},
    "plan_file": "plan.json",
}
MULTIPLY = {"name": "m", "type": "Multiply", "bottom": "dense", "top": "m", "weight_dims": [3, 2]}


def written(tmp_path, *, solver=(), data=(), optimizer=None, layers=(EMBEDDING, MULTIPLY), drop=()):
    clause = {key: value for key, value in {**SOLVER, **dict(solver)}.items() if key not in drop}
    optimizer = optimizer or {"type": "Adam", "adam_hparam": {"learning_rate": 0.5, "beta1": 0.25}}
    path = tmp_path / "conf.json"
    path.write_text(json.dumps({"solver": clause, "optimizer": optimizer, "layers": [{**DATA, **dict(data)}, *layers]}))
    return str(path)


def test_the_layers(tmp_path):
    training = read_training(written(tmp_path))
    given, embedding, multiply = training.parts
    assert [(slots.top_name, slots.nnz_per_slot) for slots in given.data_reader_sparse_param_array] == [
        ("wide", [30]),
        ("deep", [2, 2, 2]),
    ]
    assert (embedding.max_vocabulary_size_per_gpu, embedding.combiner, embedding.optimizer) == (50, "mean", None)
    assert (multiply.layer_type, multiply.weight_dims) == (hugectr.Layer_t.WeightMultiply, [3, 2])


def test_an_embedding_may_have_its_own_optimizer(tmp_path):
    own = {**EMBEDDING, "optimizer": {"type": "SGD", "update_type": "Local", "sgd_hparam": {"learning_rate": 0.5}}}
    embedding = read_training(written(tmp_path, layers=[own])).parts[1]
    assert embedding.optimizer == hugectr.CreateOptimizer(Optimizer_t.SGD, Update_t.Local)


@pytest.mark.parametrize(
    ("clause", "kind", "check"),
    [
        ({}, hugectr.DataReaderType_t.Norm, hugectr.Check_t.Sum),
        ({"check": "None"}, hugectr.DataReaderType_t.Norm, hugectr.Check_t.Non),
        ({"format": "Parquet", "slot_size_array": [5, 6, 7, 8]}, hugectr.DataReaderType_t.Parquet, hugectr.Check_t.Sum),
        (
            {"format": "Raw", "num_samples": 9, "eval_num_samples": 4, "num_workers": 3, "float_label_dense": True},
            hugectr.DataReaderType_t.Raw,
            hugectr.Check_t.Sum,
        ),
    ],
)
def test_the_reader(tmp_path, clause, kind, check):
    reader = read_training(written(tmp_path, data=clause)).reader
    assert (reader.data_reader_type, reader.check_type) == (kind, check)
    assert (reader.source, reader.eval_source) == (["train.txt"], "val.txt")
    assert reader.slot_size_array == clause.get("slot_size_array", [])
    assert reader.num_samples == clause.get("num_samples", 0)
    assert reader.num_workers == clause.get("num_workers", 12)
    assert reader.float_label_dense == clause.get("float_label_dense", False)


def test_the_optimizer_and_its_rate(tmp_path):
    optimizer = read_training(written(tmp_path)).optimizer
    assert (optimizer.optimizer_type, optimizer.update_type) == (Optimizer_t.Adam, Update_t.Local)
    assert (optimizer.learning_rate, optimizer.beta1, optimizer.beta2) == (0.5, 0.25, 0.999)
    rates = {"learning_rate": 8.0, "warmup_steps": 4, "decay_start": 6, "decay_steps": 2, "atomic_update": True}
    path = written(tmp_path, optimizer={"type": "SGD", "global_update": True, "sgd_hparam": rates})
    assert read_training(path).optimizer.update_type is Update_t.Global
    scheduler = get_learning_rate_scheduler(path)
    assert [scheduler.get_next() for _ in range(8)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 2.0, 0.0]


def test_the_solver(tmp_path):
    solver = SolverParser(written(tmp_path))
    assert (solver.max_iter, solver.num_epochs, solver.repeat_dataset) == (30, 0, True)
    assert (solver.batchsize, solver.batchsize_eval, solver.vvgpu) == (8, 8, [[0, 1]])
    assert (solver.display, solver.snapshot, solver.eval_interval, solver.max_eval_batches) == (10, 100, 5, 3)
    assert (solver.snapshot_prefix, solver.export_predictions_prefix) == ("./", "")
    assert solver.metrics_spec == {MetricsType.AUC: 1.0}
    assert (solver.use_mixed_precision, solver.i64_input_key) == (False, False)
    more = {"mixed_precision": 1024, "input_key_type": "I64", "eval_metrics": ["AUC:0.75", "AverageLoss"]}
    solver = SolverParser(written(tmp_path, solver={**more, "gpu": [[0], [1]], "dense_model_file": "m.model"}))
    assert (solver.use_mixed_precision, solver.scaler, solver.i64_input_key) == (True, 1024.0, True)
    assert solver.metrics_spec == {MetricsType.AUC: 0.75, MetricsType.AverageLoss: 1.0}
    assert (solver.vvgpu, solver.model_file) == ([[0], [1]], "m.model")


@pytest.mark.parametrize(("key", "batches"), [("eval_batches", 5), ("max_eval_batches", 5), ("max_eval_samples", 2)])
def test_evaluation_has_three_spellings(tmp_path, key, batches):
    assert (
        SolverParser(
            written(tmp_path, solver={key: 5, "batchsize_eval": 4}, drop={"max_eval_batches"} - {key})
        ).max_eval_batches
        == batches
    )


@pytest.mark.parametrize("release", ["2.3", "3.0"])
def test_a_training_file_is_read_in_each_release_that_trains_one(tmp_path, monkeypatch, release):
    """Finding M: with 2.3 selected, what only the function of 3.0 takes was an unknown parameter."""
    monkeypatch.setenv("TERAREC_HUGECTR_RELEASE", release)
    solver = SolverParser(written(tmp_path))
    assert (solver.max_iter, solver.display, solver.max_eval_batches) == (30, 10, 3)


def test_without_a_length_it_is_one_epoch(tmp_path):
    solver = SolverParser(written(tmp_path, drop={"max_iter"}))
    assert (solver.max_iter, solver.num_epochs, solver.repeat_dataset) == (0, 1, False)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"solver": {"num_epochs": 2}}, ("/conf.json.solver", "got max_iter and num_epochs")),
        ({"solver": {"lr_policy": "cosine"}}, ("/conf.json.solver.lr_policy",)),
        ({"solver": {"mixed_precision": 100}}, ("/conf.json.solver.mixed_precision",)),
        ({"solver": {"eval_metrics": ["F1"]}}, ("/conf.json.solver.eval_metrics",)),
        (
            {"solver": {"max_eval_samples": 9}},
            ("/conf.json.solver", "got max_eval_batches, max_eval_samples of eval_batches"),
        ),
        ({"solver": {"gpu": []}}, ("/conf.json.solver: solver_parser_helper: vvgpu", "got [[]]")),
        ({"solver": {"batch": 9}}, ("/conf.json.solver", "got an unknown key 'batch'")),
        ({"solver": {"batchsize": 9}}, ("/conf.json.solver: solver_parser_helper: batchsize",)),
        ({"drop": {"display"}}, ("/conf.json.solver", "no display")),
    ],
)
def test_solvers_that_cannot_be(tmp_path, changes, place):
    with pytest.raises(WrongInputError, check=at(f"{tmp_path}{place[0]}", *place[1:])):
        SolverParser(written(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"data": {"format": "Raw"}}, "/conf.json.layers[0]"),
        ({"data": {"check": "Crc"}}, "/conf.json.layers[0].check"),
        ({"data": {"sources": "x"}}, "/conf.json.layers[0]"),
        ({"optimizer": {"type": "Lion"}}, "/conf.json.optimizer.type"),
        ({"optimizer": {"type": "Adam", "adam_hparam": {"beta3": 1}}}, "/conf.json.optimizer.adam_hparam"),
        (
            {"layers": [{**EMBEDDING, "sparse_embedding_hparam": {"embedding_vec_size": 0}}]},
            "/conf.json.layers[1].sparse_embedding_hparam.embedding_vec_size",
        ),
    ],
)
def test_training_that_cannot_be(tmp_path, changes, where):
    with pytest.raises(WrongInputError, check=at(f"{tmp_path}{where}")):
        read_training(written(tmp_path, **changes))
