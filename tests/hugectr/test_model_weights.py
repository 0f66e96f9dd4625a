# SPDX-License-Identifier: Apache-2.0
"""What scripts do with model files: go on, fine-tune, start new layers over trained rows, load some of several."""

from pathlib import Path

import numpy as np
import pytest
import torch

import terarec.hugectr as hugectr
from terarec.formats.hugectr.weights import SparseFileLayout, SparseRows, read_sparse_file, write_sparse_folder
from terarec.hugectr.errors import BrokenFileError, FileCannotOpenError, WrongInputError
from tests.errors import at
from tests.hugectr.scripts import Layer, dense_stack, embed, layer, model, to_loss

LOCALIZED = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash
MOMENTUM = {"optimizer_type": hugectr.Optimizer_t.MomentumSGD, "momentum_factor": 0.5}


def two_embeddings(sources, optimizer=None, **settings):
    made = model(*sources, optimizer=optimizer, **settings)
    embed(made, "one", 4)
    embed(made, "two", 4, kind=LOCALIZED)
    return head(made, 16)


def head(made, width):
    """Layers over both embeddings."""
    layer(made, Layer.Reshape, "one", "one_flat", leading_dim=16)
    layer(made, Layer.Reshape, "two", "two_flat", leading_dim=16)
    layer(made, Layer.Concat, "one_flat two_flat dense", "all")
    return to_loss(made, dense_stack(made, "all", width))


def train(made, steps):
    if not made.get_data_reader_train().is_started():
        made.start_data_reading()
    made.set_learning_rate(0.1)
    losses = []
    for _ in range(steps):
        made.train()
        losses.append(made.get_current_loss())
    return losses


def rows(made, name):
    tables = made.module.collection(name).tables.values()
    return {
        table.name: dict(zip(table.keys().tolist(), table.export(table.keys()).weights.tolist(), strict=True))
        for table in tables
    }


def load(made, prefix, *, states=True):
    made.load_dense_weights(f"{prefix}_dense_6.model")
    made.load_sparse_weights([f"{prefix}{number}_sparse_6.model" for number in (0, 1)])
    if states:
        made.load_dense_optimizer_states(f"{prefix}_opt_dense_6.model")
        made.load_sparse_optimizer_states([f"{prefix}{number}_opt_sparse_6.model" for number in (0, 1)])


def test_training_resumes_from_files_as_if_it_had_not_stopped(tmp_path, planted):
    whole, second = (two_embeddings(planted[:2], MOMENTUM) for _ in range(2))
    prefix = str(tmp_path / "m")
    train(whole, 6)
    whole.save_params_to_files(prefix, 6)
    load(second, prefix)
    for made in (whole, second):
        made.get_data_reader_train().set_source()
    assert train(whole, 4) == train(second, 4)
    assert rows(whole, "two") == rows(second, "two")


def reordered(prefix, order):
    """Give the rows of both embeddings, and their states, another order, as HugeCTR's files have any."""
    for number in (0, 1):
        folder, states = Path(f"{prefix}{number}_sparse_6.model"), f"{prefix}{number}_opt_sparse_6.model"
        for path in folder.iterdir():
            records = np.fromfile(path, "<f4" if path.name == "emb_vector" else "<i8").reshape(len(order), -1)
            records[order].tofile(path)
        values = np.fromfile(states, "<f4").reshape(-1, 4)  # of one state on one device
        values[: len(order)] = values[order]
        values.tofile(states)


def test_states_go_by_the_order_of_the_rows_that_were_loaded(tmp_path, planted):
    trained, second = (two_embeddings(planted[:2], MOMENTUM) for _ in range(2))
    prefix = str(tmp_path / "m")
    train(trained, 6)
    trained.save_params_to_files(prefix, 6)
    reordered(prefix, np.random.default_rng(0).permutation(80))
    load(second, prefix)
    for name in ("one", "two"):
        expected, found = (made.module.collection(name).tables for made in (trained, second))
        for table in expected:
            rows_of_both = [tables[table].export(expected[table].keys()) for tables in (expected, found)]
            assert torch.equal(*(values.weights for values in rows_of_both))
            assert torch.equal(*(values.state["momentum"] for values in rows_of_both))
    states = [f"{prefix}{number}_opt_sparse_6.model" for number in (0, 1)]
    np.arange(80).tofile(f"{prefix}1_sparse_6.model/key")  # other rows by now
    with pytest.raises(BrokenFileError, check=at(f"{prefix}1_sparse_6.model")):
        second.load_sparse_optimizer_states(states)
    # Files that this model wrote are in its own order.
    second.save_params_to_files(prefix, 6)
    second.load_sparse_optimizer_states(states)
    assert torch.equal(rows_of_both[1].state["momentum"], found[table].export(rows_of_both[1].keys).state["momentum"])


def test_new_layers_over_trained_rows(tmp_path, planted):
    trained = two_embeddings(planted[:2])
    train(trained, 6)
    trained.graph_to_json(str(tmp_path / "graph.json"))
    trained.save_params_to_files(str(tmp_path / "m"), 6)
    reader = trained.reader_params
    tuned = hugectr.Model(trained.solver, reader, hugectr.CreateOptimizer())
    tuned.construct_from_json(str(tmp_path / "graph.json"), include_dense_network=False)
    head(tuned, 5)
    tuned.load_sparse_weights({"two": str(tmp_path / "m1_sparse_6.model"), "one": str(tmp_path / "m0_sparse_6.model")})
    before = rows(tuned, "one")
    assert before == rows(trained, "one")
    tuned.freeze_embedding("one")
    train(tuned, 3)
    assert rows(tuned, "one") == before
    assert rows(tuned, "two") != rows(trained, "two")
    tuned.unfreeze_embedding()
    train(tuned, 1)
    assert rows(tuned, "one") != before


def test_vectors_from_elsewhere_are_imported_as_a_folder(tmp_path, planted):
    made = two_embeddings(planted[:2])
    keys, vectors = np.arange(80), np.arange(320, dtype=np.float32).reshape(80, 4)
    write_sparse_folder(tmp_path / "pretrained", [SparseRows(keys, vectors)])
    made.load_sparse_weights({"one": str(tmp_path / "pretrained")})
    assert rows(made, "one")["one"][7] == [28.0, 29.0, 30.0, 31.0]


def test_releases_up_to_3_0_keep_an_embedding_in_one_file(tmp_path, planted):
    made = two_embeddings(planted[:2], compat_release="3.0")
    train(made, 2)
    made.save_params_to_files(str(tmp_path / "m"), 6)
    layout = SparseFileLayout(4, 8, has_slots=True)
    found = list(read_sparse_file(tmp_path / "m1_sparse_6.model", layout))
    held = rows(made, "two")
    assert sum(len(part.keys) for part in found) == sum(map(len, held.values()))
    other = two_embeddings(planted[:2], seed=9)
    load(other, str(tmp_path / "m"), states=False)
    assert rows(other, "two") == held


def test_files_of_other_models_are_rejected_in_the_facades_errors(tmp_path, planted):
    made = two_embeddings(planted[:2])
    prefix = str(tmp_path / "m")
    made.save_params_to_files(prefix, 6)
    with pytest.raises(FileCannotOpenError, check=at(f"load_sparse_weights: {tmp_path}/absent")):
        made.load_sparse_weights([f"{prefix}0_sparse_6.model", str(tmp_path / "absent")])
    with pytest.raises(BrokenFileError, check=at(f"load_dense_weights: {prefix}_opt_dense_6.model")):
        made.load_dense_weights(f"{prefix}_opt_dense_6.model")
    with pytest.raises(WrongInputError, check=at("load_sparse_weights")):
        made.load_sparse_weights([f"{prefix}0_sparse_6.model"])
