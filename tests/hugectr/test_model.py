# SPDX-License-Identifier: Apache-2.0
"""`Model` as scripts use it: it learns, its calls have HugeCTR's meaning, and misuse is reported."""

import itertools
import math

import numpy as np
import pytest
import torch

import terarec.hugectr as hugectr
from terarec.data.records import NormSource, RecordReader
from terarec.errors import ConfigError
from terarec.hugectr.enums import Error_t
from terarec.hugectr.errors import HugeCTRError, IllegalCallError, OutOfBoundError, OutOfMemoryError, WrongInputError
from terarec.optim import RowOptimizer
from terarec.spec import SGDSpec
from tests.errors import at
from tests.hugectr.planted import layout
from tests.hugectr.scripts import Layer, auc_of, build_dcn, dcn, embed, layer, model, to_loss


def losses_of(made, steps):
    """The curve of a script's own loop."""
    made.start_data_reading()
    schedule, losses = made.get_learning_rate_scheduler(), []
    for _ in range(steps):
        made.set_learning_rate(schedule.get_next())
        assert made.train()
        losses.append(made.get_current_loss())
    return losses


def test_a_script_learns_the_planted_model(planted, capsys):
    *sources, best_auc = planted
    made = dcn(*sources)
    made.summary()
    made.fit(max_iter=160, display=40, eval_interval=80)
    output = capsys.readouterr().out
    assert (
        "MultiCross                              all                           cross                         (None, 35)"
        in output
    )
    assert output.count("Iter: ") == 4
    assert output.count("Evaluation, AUC: ") == 2
    assert "Finish 160 iterations with batchsize: 500 in " in output
    assert auc_of(made) > 0.95 * best_auc


def test_random_labels_teach_nothing(random_labels):
    made = dcn(*random_labels)
    made.fit(max_iter=60, display=0, eval_interval=0)
    assert abs(auc_of(made) - 0.5) < 0.03


def test_more_devices_than_there_are_change_nothing_and_are_reported_once(planted, capsys):
    one = losses_of(dcn(*planted[:2]), 5)
    output = capsys.readouterr().out
    four = losses_of(dcn_on([[0, 1], [2, 3]], planted), 5)
    assert one == four
    assert "devices" not in output
    assert capsys.readouterr().out.count("vvgpu names 4 devices: training runs on cpu, with the same results") == 1


def dcn_on(devices, planted):
    made = hugectr.Model(
        hugectr.CreateSolver(
            vvgpu=devices, batchsize=500, batchsize_eval=500, lr=0.01, seed=5, i64_input_key=True, max_eval_batches=10
        ),
        hugectr.DataReaderParams(
            data_reader_type=hugectr.DataReaderType_t.Norm,
            source=planted[0],
            eval_source=planted[1],
            check_type=hugectr.Check_t.Sum,
        ),
        hugectr.CreateOptimizer(),
    )
    return build_dcn(made)


def test_weights_of_labels_come_from_the_input_or_from_compile(planted):
    like = model(*planted[:2])

    def weights(*names_and_weights):
        made = hugectr.Model(like.solver, like.reader_params, hugectr.CreateOptimizer())
        made.add(hugectr.Input([1, 1], ["b", "a"], [0.25, 0.5], 3, "dense", []))
        for name in ("b", "a"):
            layer(made, Layer.InnerProduct, "dense", f"{name}_logit")
            layer(made, Layer.BinaryCrossEntropyLoss, f"{name}_logit {name}", f"{name}_loss")
        made.compile(*names_and_weights)
        return [(label.name, label.weight) for label in made.module.spec.labels]

    assert weights() == [("a", 0.5), ("b", 0.25)]
    assert weights(["b"], [2.0]) == [("a", 0.5), ("b", 2.0)]


def test_seed_0_is_another_model_each_time(planted):
    assert losses_of(dcn(*planted[:2], seed=0), 1) != losses_of(dcn(*planted[:2], seed=0), 1)


def test_the_module_may_be_trained_in_a_loop_of_ones_own(planted):
    made = dcn(*planted[:2])
    module = made.module
    assert isinstance(module, torch.nn.Module)
    dense, rows = torch.optim.Adam(module.parameters(), lr=0.01), RowOptimizer(module, SGDSpec(lr=0.1))
    reader = RecordReader(
        NormSource(planted[0], layout(), checksum=True), batch_size=500, repeat=True, drop_last=True, threads=1
    )
    losses = []
    for batch in itertools.islice(reader, 30):
        dense.zero_grad()
        loss = module.loss(batch)
        loss.backward()
        dense.step()
        rows.step()
        losses.append(loss.item())
    reader.close()
    assert losses[-1] < 0.8 * losses[0]


def test_metrics_are_of_the_batches_since_they_were_last_read(planted):
    made = dcn(*planted[:2], metrics_spec={hugectr.MetricsType.AverageLoss: 0.0, hugectr.MetricsType.AUC: 1.0})
    made.start_data_reading()
    made.eval()
    (_, auc), (_, first) = made.get_eval_metrics()
    made.eval()
    _, (_, second) = made.get_eval_metrics()
    assert math.isfinite(first)
    assert first != second
    assert 0 < auc < 1


def test_tensors_of_the_last_iterations_can_be_looked_at(planted, tmp_path):
    made = dcn(*planted[:2])
    with pytest.raises(IllegalCallError, check=at("check_out_tensor")):
        made.check_out_tensor("flat", hugectr.Tensor_t.Train)
    losses_of(made, 1)
    made.eval()
    assert made.check_out_tensor("embedding", hugectr.Tensor_t.Train).shape == (500, 4, 8)
    assert made.check_out_tensor("both", hugectr.Tensor_t.Evaluate).dtype == np.float32
    predictions = made.check_out_tensor("logit", hugectr.Tensor_t.Evaluate)
    assert predictions.min() > 0
    assert predictions.max() < 1
    with pytest.raises(WrongInputError, check=at("check_out_tensor: tensor_name")):
        made.check_out_tensor("flatt", hugectr.Tensor_t.Train)
    files = [tmp_path / "predictions", tmp_path / "labels"]
    for _ in range(2):
        made.export_predictions(*map(str, files))
    written = [np.array(file.read_text().split(" ")[:-1], np.float32) for file in files]
    np.testing.assert_allclose(written[0], np.tile(predictions[:, 0], 2), rtol=1e-5)
    assert set(written[1]) == {0.0, 1.0}


def rows_of(table):
    (chunk,) = table.export_chunks(1000)
    return chunk.weights.clone()


def test_frozen_parts_do_not_move(planted):
    made = dcn(*planted[:2])
    losses_of(made, 1)
    weights = [weight.detach().clone() for weight in made.module.layers.parameters()]
    table = made.module.collection("embedding").tables["embedding"]
    rows = rows_of(table)
    made.freeze_dense()
    made.freeze_embedding("embedding")
    made.train()
    assert all(map(torch.equal, weights, made.module.layers.parameters()))
    assert torch.equal(rows_of(table), rows)
    made.unfreeze_embedding()
    made.train()
    assert all(map(torch.equal, weights, made.module.layers.parameters()))
    assert not torch.equal(rows_of(table), rows)
    made.unfreeze_dense()
    made.train()
    assert not all(map(torch.equal, weights, made.module.layers.parameters()))
    with pytest.raises(WrongInputError, check=at("freeze_embedding")):
        made.freeze_embedding("wide")


def test_another_schedule_starts_at_its_first_step(planted):
    made = dcn(*planted[:2])
    losses_of(made, 3)
    made.reset_learning_rate_scheduler(base_lr=1.0, warmup_steps=4)
    assert [made.get_learning_rate_scheduler().get_next() for _ in range(3)] == [0.25, 0.5, 0.75]


def test_more_keys_than_the_workspace_has_room_for_are_an_error(planted, monkeypatch):
    def narrow():
        made = model(*planted[:2])
        embed(made, "embedding", 8, workspace=0, slot_size_array=[10] * 4)
        layer(made, Layer.Reshape, "embedding", "flat", leading_dim=32)
        made = to_loss(made, "flat")
        made.start_data_reading()
        return made

    with pytest.raises(OutOfBoundError, check=at("SparseEmbedding 'embedding'")) as error:
        narrow().train()
    assert error.value.error is Error_t.OutOfBound
    monkeypatch.setenv("HUGECTR_DISABLE_OVERFLOW_CHECK", "1")
    assert narrow().train()


class TestMisuse:
    def test_calls_before_compile(self, planted):
        made = model(*planted[:2])
        for call in (made.fit, made.train, made.eval, made.start_data_reading, made.get_current_loss):
            with pytest.raises(IllegalCallError, check=at(call.__name__, "not compiled")):
                call()

    def test_adding_after_compile_and_compiling_twice(self, planted):
        made = dcn(*planted[:2])
        with pytest.raises(IllegalCallError, check=at("add", "expected every add before compile")):
            layer(made, Layer.ReLU, "both", "late")
        with pytest.raises(IllegalCallError, check=at("compile")):
            made.compile()

    def test_training_before_reading_was_started(self, planted):
        with pytest.raises(IllegalCallError, check=at("train")):
            dcn(*planted[:2]).train()

    def test_parts_in_the_wrong_order(self, planted):
        made = model(*planted[:2])
        with pytest.raises(IllegalCallError, check=at("add", "got Input as part 2")):
            made.add(hugectr.Input(1, "label", 3, "dense", []))
        bare = hugectr.Model(made.solver, made.reader_params, hugectr.CreateOptimizer())
        with pytest.raises(IllegalCallError, check=at("add", "got DenseLayer as part 1")):
            layer(bare, Layer.ReLU, "dense", "x")
        with pytest.raises(WrongInputError, check=at("Model.add: input")):
            made.add("ReLU")

    def test_names_that_are_not_there_or_are_there_already(self, planted):
        made = model(*planted[:2])
        with pytest.raises(WrongInputError, check=at("add", "ReLU 'x' reads 'dens'")):
            layer(made, Layer.ReLU, "dens", "x")
        with pytest.raises(WrongInputError, check=at("add", "SparseEmbedding 'e' reads 'dense'")):
            embed(made, "e", 8, bottom="dense")
        with pytest.raises(WrongInputError, check=at("add", "ReLU 'dense' makes 'dense', which is there already")):
            layer(made, Layer.ReLU, "dense", "dense")

    def test_shapes_that_do_not_fit_name_both(self, planted):
        made = model(*planted[:2])
        layer(made, Layer.InnerProduct, "dense", "x", num_output=3)
        layer(made, Layer.InnerProduct, "dense", "y", num_output=4)
        layer(made, Layer.Add, "x y", "z")
        with pytest.raises(WrongInputError, check=at("compile: layer 'z' (bottoms x, y): layer add")):
            to_loss(made, "z")

    def test_a_model_without_a_loss(self, planted):
        made = model(*planted[:2])
        layer(made, Layer.InnerProduct, "dense", "x")
        with pytest.raises(WrongInputError, check=at("compile: graph")):
            made.compile()

    def test_losses_that_are_not_there(self, planted):
        made = model(*planted[:2])
        layer(made, Layer.InnerProduct, "dense", "x")
        layer(made, Layer.BinaryCrossEntropyLoss, "x label", "loss")
        with pytest.raises(WrongInputError, check=at("compile", "got 1 loss_names and 0 loss_weights")):
            made.compile(["label"])
        with pytest.raises(WrongInputError, check=at("compile: loss_names")):
            made.compile(["click"], [1.0])

    def test_a_regularizer_with_other_losses(self, planted):
        made = hugectr.Model(model(*planted[:2]).solver, model(*planted[:2]).reader_params, hugectr.CreateOptimizer())
        made.add(hugectr.Input([1, 1], ["a", "b"], 3, "dense", []))
        for name in ("a", "b"):
            layer(made, Layer.InnerProduct, "dense", f"{name}_logit")
            logits = f"{name}_logit {name}"
            layer(made, Layer.BinaryCrossEntropyLoss, logits, f"{name}_loss", use_regularizer=name == "b")
        with pytest.raises(WrongInputError, check=at("BinaryCrossEntropyLoss 'b_loss'")):
            made.compile()

    def test_embeddings_whose_keys_count_otherwise(self, planted):
        made = model(*planted[:2])
        embed(made, "hashed", 8)
        one_hot = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingOneHot
        embed(made, "counted", 8, kind=one_hot, slot_size_array=[20] * 4)
        layer(made, Layer.Reshape, "hashed", "flat", leading_dim=32)
        with pytest.raises(
            WrongInputError, check=at("compile", "keys count from 0 in each slot, besides hash embeddings")
        ):
            to_loss(made, "flat")
        short = model(*planted[:2])
        embed(short, "counted", 8, kind=one_hot, slot_size_array=[20] * 3)
        layer(short, Layer.Reshape, "counted", "flat", leading_dim=32)
        with pytest.raises(WrongInputError, check=at("SparseEmbedding 'counted': slot_size_array")):
            to_loss(short, "flat")

    def test_tables_that_memory_cannot_hold(self, planted):
        made = model(*planted[:2])
        one_hot = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingOneHot
        embed(made, "huge", 8, kind=one_hot, slot_size_array=[10**12] * 4)
        layer(made, Layer.Reshape, "huge", "flat", leading_dim=32)
        with pytest.raises(
            OutOfMemoryError,
            check=at("compile: weights float32[4000000000000, 8] of 4 tables ('huge.0', 'huge.1', 'huge.2', ...)"),
        ) as error:
            to_loss(made, "flat")
        assert error.value.error is Error_t.OutOfMemory

    def test_a_batch_that_does_not_divide(self):
        with pytest.raises(WrongInputError, check=at("CreateSolver: batchsize")):
            hugectr.CreateSolver(vvgpu=[[0, 1]], batchsize=501)

    def test_numbers_of_iterations_that_the_mode_needs(self, planted):
        with pytest.raises(WrongInputError, check=at("fit: max_iter")):
            dcn(*planted[:2]).fit(max_iter=0)
        with pytest.raises(WrongInputError, check=at("fit: num_epochs")):
            dcn(*planted[:2], repeat_dataset=False).fit(max_iter=10)
        with pytest.raises(IllegalCallError, check=at("start_data_reading")):
            dcn(*planted[:2], repeat_dataset=False).start_data_reading()
        with pytest.raises(IllegalCallError, check=at("set_source")):
            dcn(*planted[:2]).set_source("a", "b")

    def test_an_optimizer_that_is_none(self, planted):
        made = model(*planted[:2])
        with pytest.raises(WrongInputError, check=at("Model: opt_params")):
            hugectr.Model(made.solver, made.reader_params, "Adam")

    def test_every_error_is_a_runtime_error_and_one_of_terarec(self):
        assert issubclass(WrongInputError, ConfigError)
        assert issubclass(WrongInputError, HugeCTRError)
        assert issubclass(IllegalCallError, RuntimeError)
