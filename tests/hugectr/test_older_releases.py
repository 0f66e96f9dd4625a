# SPDX-License-Identifier: Apache-2.0
"""Forms of `Model` that older releases have, and formats that only they have."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import terarec.hugectr as hugectr
from terarec.formats.hugectr import write_file_list
from terarec.formats.hugectr.raw import FixedRecordWriter, raw_types
from terarec.hugectr.enums import Error_t
from terarec.hugectr.errors import BrokenFileError, FileCannotOpenError, OutOfBoundError, WrongInputError
from terarec.hugectr.optimizer import CreateOptimizer
from tests.errors import at
from tests.hugectr import families
from tests.hugectr.planted import ROWS, Planted, layout
from tests.hugectr.scripts import ADAM, auc_of, dcn, embed, model


def write_raw(path, data):
    types = raw_types(layout(key_bytes=4), float_label_dense=True)
    with FixedRecordWriter(path, layout(key_bytes=4), types) as writer:
        writer.write(data.label, data.dense, list(data.keys))
        writer.close()
    return str(path)


def write_parquet(directory, data):
    """A file list of one Parquet file with its metadata."""
    directory.mkdir()
    columns = {"label": data.label[:, 0]}
    columns |= {f"I{number}": column for number, column in enumerate(data.dense.T)}
    columns |= {f"C{number}": slot for number, slot in enumerate(data.keys)}
    pyarrow.parquet.write_table(pa.table(columns), directory / "0.parquet")
    names = list(columns)
    places = {
        kind: [{"col_name": name, "index": names.index(name)} for name in names if name.startswith(prefix)]
        for kind, prefix in (("labels", "label"), ("conts", "I"), ("cats", "C"))
    }
    stats = [{"file_name": "0.parquet", "num_rows": len(data.label)}]
    (directory / "_metadata.json").write_text(json.dumps({"file_stats": stats, **places}))
    write_file_list(directory / "list.txt", [directory / "0.parquet"])
    return str(directory / "list.txt")


def test_release_3_0_has_the_data_in_the_input_and_rates_in_the_optimizer(planted):
    optimizer = CreateOptimizer(
        optimizer_type=hugectr.Optimizer_t.Adam,
        update_type=hugectr.Update_t.Local,
        learning_rate=0.01,
        warmup_steps=2,
        use_mixed_precision=False,
    )
    solver = hugectr.solver_parser_helper(
        batchsize=500, batchsize_eval=500, max_eval_batches=10, seed=5, i64_input_key=True, max_iter=100, display=50
    )
    made = hugectr.Model(solver, optimizer)
    made.add(
        hugectr.Input(
            data_reader_type=hugectr.DataReaderType_t.Norm,
            source=planted[0],
            eval_source=planted[1],
            check_type=hugectr.Check_t.Sum,
            label_dim=1,
            label_name="label",
            dense_dim=3,
            dense_name="dense",
            data_reader_sparse_param_array=[
                hugectr.DataReaderSparseParam(hugectr.DataReaderSparse_t.Distributed, 4, 1, 4)
            ],
            sparse_names=["data"],
        )
    )
    made.add(
        hugectr.SparseEmbedding(hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash, 100, 8, 0, "embedding", "data")
    )
    families.dlrm(made)
    assert made.get_learning_rate_scheduler().get_lr() == pytest.approx(0.005)
    made.fit()
    assert auc_of(made) > 0.95 * planted[2]


def test_dlrm_over_one_hot_embeddings_and_raw_files(tmp_path):
    valid = Planted(5_000, seed=1)
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Raw,
        source=write_raw(tmp_path / "train.bin", Planted(20_000)),
        eval_source=write_raw(tmp_path / "valid.bin", valid),
        num_samples=20_000,
        eval_num_samples=5_000,
        float_label_dense=True,
        slot_size_array=[ROWS] * 4,
    )
    one_hot = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingOneHot

    def made(rows):
        settings = {"i64_input_key": False, "lr": 1.0}
        fresh = model("", "", reader=reader, optimizer={"optimizer_type": hugectr.Optimizer_t.SGD}, **settings)
        embed(fresh, "embedding", 8, kind=one_hot, slot_size_array=[rows] * 4)
        return families.dlrm(fresh)

    learned = made(ROWS)
    learned.fit(max_iter=120, display=0, eval_interval=0)
    assert auc_of(learned) > 0.95 * valid.best_auc
    small = made(5)
    small.start_data_reading()
    with pytest.raises(OutOfBoundError, check=at("train: feature 'data.0'")) as error:
        small.train()
    assert error.value.error is Error_t.OutOfBound


def test_parquet_files_get_the_offsets_of_their_slots(tmp_path):
    valid = Planted(5_000, seed=1)
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet,
        source=[write_parquet(tmp_path / "train", Planted(20_000))],
        eval_source=write_parquet(tmp_path / "valid", valid),
        slot_size_array=[ROWS] * 4,
    )
    made = model("", "", reader=reader, optimizer=ADAM)
    embed(made, "embedding", 8)
    families.dlrm(made)
    made.fit(max_iter=120, display=0, eval_interval=0)
    assert auc_of(made) > 0.95 * valid.best_auc
    (table,) = made.module.collection("embedding").tables.values()
    assert np.array_equal(table.keys(), np.arange(4 * ROWS))


def test_data_that_cannot_be_read_is_reported_in_the_facades_errors(planted, tmp_path):
    with pytest.raises(FileCannotOpenError, check=at(f"set_source: {tmp_path}/none.txt")):
        dcn(str(tmp_path / "none.txt"), planted[1]).start_data_reading()
    (tmp_path / "bad.txt").write_text("two\nfiles\n")
    with pytest.raises(BrokenFileError, check=at(f"set_source: {tmp_path}/bad.txt: line 1")):
        dcn(str(tmp_path / "bad.txt"), planted[1]).start_data_reading()
    made = dcn(*planted[:2])
    with pytest.raises(FileCannotOpenError, check=at(f"load_dense_weights: {tmp_path}/none.model")):
        made.load_dense_weights(str(tmp_path / "none.model"))


def test_sizes_of_too_few_slots_are_rejected(planted):
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet,
        source=planted[0],
        eval_source=planted[1],
        slot_size_array=[ROWS] * 3,
    )
    made = model("", "", reader=reader)
    embed(made, "embedding", 8)
    with pytest.raises(WrongInputError, check=at("slot_size_array")):
        families.dlrm(made)


def test_mixed_precision_with_loss_scaling_learns_the_planted_model(planted):
    made = dcn(*planted[:2], use_mixed_precision=True, scaler=1024.0)
    made.fit(max_iter=100, display=0, eval_interval=0)
    assert auc_of(made) > 0.95 * planted[2]
