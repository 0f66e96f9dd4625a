# SPDX-License-Identifier: Apache-2.0
"""Data, files and arguments that are wrong: one line, the exception of HugeCTR's meaning, nothing half done."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import terarec.hugectr as hugectr
from terarec.errors import MissingDependencyError, NoSpaceError, StorageError
from terarec.hugectr.enums import Error_t
from terarec.hugectr.errors import (
    BrokenFileError,
    FileCannotOpenError,
    HugeCTRError,
    IllegalCallError,
    InvalidEnvError,
    LossCannotConvergeError,
    OutOfBoundError,
    OutOfMemoryError,
    StoreError,
    WrongInputError,
    as_hugectr_errors,
)
from terarec.memory.rocksdb import RocksDBStore
from tests.errors import at
from tests.hugectr.families import dlrm, wide_deep
from tests.hugectr.planted import ROWS, Planted, write_norm
from tests.hugectr.scripts import ADAM, Layer, dcn, embed, layer, model, norm_reader, solver, to_loss
from tests.hugectr.test_older_releases import write_parquet, write_raw

SMALL = {"batchsize": 50, "batchsize_eval": 50, "max_eval_batches": 2}


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The list of a Norm file of 200 records."""
    return write_norm(tmp_path_factory.mktemp("few"), Planted(200), files=1)


def started(made):
    made.start_data_reading()
    return made


def rejects(error, where, call, *args, problem="", **kwargs):
    """`call` raises `error` at `where` in one line, with `problem` as part of what it received."""
    with pytest.raises(error, check=at(where, problem)) as found:
        call(*args, **kwargs)
    assert isinstance(found.value, HugeCTRError)
    assert "\n" not in str(found.value)
    return found.value


class TestFileLists:
    @pytest.mark.parametrize(
        ("content", "error", "where", "problem"),
        [
            ("", BrokenFileError, "{list}: line 1", "got ''"),
            ("0\n", BrokenFileError, "reader", ""),
            ("2\n0.data\n", BrokenFileError, "{list}: line 1", "got 2 files"),
            ("1\nnone.data\n", FileCannotOpenError, "none.data", ""),
            (b"\xff\xfe\x00", BrokenFileError, "{list}", "byte 0"),
        ],
        ids=["empty", "no files", "fewer files", "missing file", "no text"],
    )
    def test_a_wrong_list(self, few, tmp_path, content, error, where, problem):
        path = tmp_path / "list.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        place = "set_source: " + where.format(list=path)
        found = rejects(error, place, dcn(str(path), few, **SMALL).fit, problem=problem, max_iter=1)
        assert found.error in (Error_t.BrokenFile, Error_t.FileCannotOpen)

    def test_a_missing_list_of_either_reader(self, few, tmp_path):
        none = str(tmp_path / "none.txt")
        for sources in ((none, few), (few, none)):
            rejects(FileCannotOpenError, f"set_source: {none}", dcn(*sources, **SMALL).fit, max_iter=1)


class TestNorm:
    def test_a_header_of_other_dimensions(self, few):
        made = model(few, few, dense=5, **SMALL)
        file = few.replace("list.txt", "0.data")
        rejects(
            BrokenFileError, f"set_source: {file}: byte 28", started, to_loss(made, "dense"), problem="dense_dim is 3"
        )

    def test_checksums_that_are_there_or_not(self, few):
        reader = hugectr.DataReaderParams(
            data_reader_type=hugectr.DataReaderType_t.Norm, source=few, eval_source=few, check_type=hugectr.Check_t.Non
        )
        made = model(few, few, reader=reader, **SMALL)
        file = few.replace("list.txt", "0.data")
        rejects(BrokenFileError, f"set_source: {file}: byte 0", started, to_loss(made, "dense"), problem="error_check")

    def test_keys_of_another_size(self, few):
        made = started(dcn(few, few, i64_input_key=False, **SMALL))
        file = few.replace("list.txt", "0.data")
        rejects(BrokenFileError, f"read: {file} (with 4-byte keys)", made.train, problem="byte 73")

    def test_a_record_with_a_wrong_checksum_is_skipped_and_counted(self, tmp_path):
        source = write_norm(tmp_path, Planted(200), files=1)
        content = bytearray((tmp_path / "0.data").read_bytes())
        content[-10] ^= 1
        (tmp_path / "0.data").write_bytes(content)
        made = dcn(source, source, repeat_dataset=False, drop_incomplete_batch=False, **SMALL)
        reader = made.get_data_reader_train()
        assert reader.num_skipped == 0
        reader.set_source()
        sizes = []
        while made.train():
            sizes.append(len(made.check_out_tensor("label", hugectr.Tensor_t.Train)))
        assert sizes == [50, 50, 50, 49]
        assert reader.num_skipped == 1


class TestRaw:
    def reader(self, path, samples):
        return hugectr.DataReaderParams(
            data_reader_type=hugectr.DataReaderType_t.Raw,
            source=path,
            eval_source=path,
            num_samples=samples,
            eval_num_samples=samples,
            float_label_dense=True,
            slot_size_array=[ROWS] * 4,
        )

    def made(self, path, samples):
        return dlrm_over(self.reader(path, samples), i64_input_key=False)

    def test_a_file_cut_short(self, tmp_path):
        path = write_raw(tmp_path / "data.bin", Planted(200))
        content = (tmp_path / "data.bin").read_bytes()
        (tmp_path / "data.bin").write_bytes(content[:-5])
        rejects(BrokenFileError, f"set_source: {path}", started, self.made(path, 200), problem="holds 6395 bytes")

    def test_fewer_samples_than_declared(self, tmp_path):
        path = write_raw(tmp_path / "data.bin", Planted(200))
        rejects(BrokenFileError, f"set_source: {path}", started, self.made(path, 300), problem="holds 6400 bytes")

    def test_no_number_of_samples(self, tmp_path):
        """Finding M: upstream's documentation makes such a reader; the model cannot read by it."""
        reader = self.reader("data.bin", 0)
        where = "DataReaderParams: num_samples"
        found = rejects(WrongInputError, where, dlrm_over, reader, i64_input_key=False, problem="got 0")
        assert found.field == "num_samples"


def dlrm_over(reader, *, slots=4, **settings):
    made = model("", "", reader=reader, **{**SMALL, **settings})
    embed(made, "embedding", 8)
    return dlrm(made)


class TestParquet:
    def made(self, source, **settings):
        reader = hugectr.DataReaderParams(
            data_reader_type=hugectr.DataReaderType_t.Parquet,
            source=source,
            eval_source=source,
            slot_size_array=[ROWS] * 4,
        )
        return dlrm_over(reader, **settings)

    def rewritten(self, directory, change):
        """The list of a Parquet file whose table went through `change`."""
        source = write_parquet(directory, Planted(200))
        table = pyarrow.parquet.read_table(directory / "0.parquet")
        pyarrow.parquet.write_table(change(table), directory / "0.parquet")
        return source

    def test_another_number_of_rows_than_the_metadata_says(self, tmp_path):
        source = self.rewritten(tmp_path / "data", lambda table: table.slice(0, 150))
        where = f"set_source: {tmp_path}/data/0.parquet"
        rejects(BrokenFileError, where, started, self.made(source), problem="holds 150 rows, expected 200")

    def test_no_metadata(self, tmp_path):
        source = write_parquet(tmp_path / "data", Planted(200))
        (tmp_path / "data" / "_metadata.json").unlink()
        rejects(FileCannotOpenError, f"set_source: {tmp_path}/data/_metadata.json", started, self.made(source))

    def test_metadata_of_other_columns(self, tmp_path):
        source = write_parquet(tmp_path / "data", Planted(200))
        path = tmp_path / "data" / "_metadata.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "cats": content["cats"][:3]}))
        where = f"set_source: {tmp_path}/data/0.parquet"
        rejects(BrokenFileError, where, started, self.made(source), problem="names 3 key columns")

    def test_keys_of_another_type(self, tmp_path):
        source = write_parquet(tmp_path / "data", Planted(200))
        where = f"set_source: {tmp_path}/data/0.parquet, column 'C0'"
        rejects(BrokenFileError, where, started, self.made(source, i64_input_key=False), problem="type is int64")

    def test_a_null(self, tmp_path):
        def with_null(table):
            return table.set_column(1, "I0", pa.array([None, *table["I0"].to_pylist()[1:]], pa.float32()))

        made = started(self.made(self.rewritten(tmp_path / "data", with_null)))
        where = f"read: {tmp_path}/data/0.parquet: row group 0, column 'I0'"
        rejects(BrokenFileError, where, made.train, problem="1 null")

    def test_numbers_that_are_none_are_reported_where_a_loss_or_a_prediction_is_requested(self, tmp_path):
        def with_nan(table):
            return table.set_column(1, "I0", pa.array(np.full(200, math.nan), pa.float32()))

        source = self.rewritten(tmp_path / "data", with_nan)
        fit = self.made(source).fit
        rejects(LossCannotConvergeError, "fit", fit, max_iter=2, display=1, problem="iteration 1 is NaN")
        evaluate = started(self.made(source)).eval
        found = rejects(LossCannotConvergeError, "eval", evaluate, problem="'label' are NaN for 50 of 50 samples")
        assert found.error is Error_t.DataCheckError


@pytest.mark.parametrize("key", [-1, ROWS])
def test_a_key_outside_its_static_table(tmp_path, key):
    data = Planted(200)
    data.keys[2, 7] = key
    source = write_parquet(tmp_path / "data", data)
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet, source=source, eval_source=source
    )
    made = model("", "", reader=reader, **SMALL)
    kind = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingOneHot
    embed(made, "embedding", 8, kind=kind, slot_size_array=[ROWS] * 4)
    made = started(dlrm(made))
    error = rejects(OutOfBoundError, "train: feature 'data.2'", made.train, problem=f"got key {key} at position 107")
    assert error.error is Error_t.OutOfBound


class TestSnapshots:
    def test_a_folder_that_cannot_be(self, few, tmp_path):
        (tmp_path / "file").write_text("mine")
        made = started(dcn(few, few, **SMALL))
        made.train()
        save, named = made.save_params_to_files, f"{tmp_path}/file"
        rejects(FileCannotOpenError, "save_params_to_files", save, f"{tmp_path}/file/x", 1, problem=named)
        rejects(FileCannotOpenError, "graph_to_json", made.graph_to_json, f"{tmp_path}/file/graph.json", problem=named)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_text() == "mine"

    def test_an_existing_directory_is_replaced_except_files_of_others(self, few, tmp_path):
        made = started(dcn(few, few, **SMALL))
        made.train()
        made.save_params_to_files(f"{tmp_path}/", 1)
        before = sorted(tmp_path.rglob("*"))
        old = (tmp_path / "_dense_1.model").read_bytes()
        made.train()
        made.save_params_to_files(f"{tmp_path}/", 1)
        assert sorted(tmp_path.rglob("*")) == before
        assert (tmp_path / "_dense_1.model").read_bytes() != old
        (tmp_path / "0_sparse_1.model" / "notes").write_text("mine")
        save, holds = made.save_params_to_files, "0_sparse_1.model holds 'notes'"
        rejects(WrongInputError, "save_params_to_files: out", save, f"{tmp_path}/", 1, problem=holds)
        assert (tmp_path / "0_sparse_1.model" / "notes").read_text() == "mine"

    def test_a_wrong_one_of_several_changes_none(self, few, tmp_path):
        made = started(wide_deep(few, few, **SMALL))
        made.train()
        made.save_params_to_files(f"{tmp_path}/", 1)
        made.train()
        table = made.module.collection("wide").tables["wide"]
        before = table.export(table.keys()).weights
        wrong = [f"{tmp_path}/0_sparse_1.model", f"{tmp_path}/none"]
        rejects(FileCannotOpenError, f"load_sparse_weights: {tmp_path}/none", made.load_sparse_weights, wrong)
        assert table.export(table.keys()).weights.equal(before)


class TestArguments:
    def test_of_model(self, few):
        reader, adam = norm_reader(few, few), hugectr.CreateOptimizer(**ADAM)
        rejects(WrongInputError, "Model: solver", hugectr.Model, None, reader, adam, problem="got None")
        found = rejects(WrongInputError, "Model: reader_params", hugectr.Model, solver(), "list.txt", adam)
        assert (found.field, found.received) == ("reader_params", "list.txt")
        bare = hugectr.Model(solver(), adam)
        rejects(WrongInputError, "add", bare.add, hugectr.Input(1, "label", 3, "dense", []), problem="data_reader_type")

    @pytest.mark.parametrize("given", [{"max_iter": "10"}, {"max_iter": 2.5}, {"display": None}, {"snapshot": True}])
    def test_of_fit(self, few, given):
        ((name, value),) = given.items()
        found = rejects(WrongInputError, f"Model.fit: {name}", dcn(few, few, **SMALL).fit, **given)
        assert (found.field, found.received) == (name, value)

    def test_of_other_calls(self, few):
        made = dcn(few, few, **SMALL)
        where = "Model.load_sparse_weights: sparse_embedding_files"
        rejects(WrongInputError, where, made.load_sparse_weights, None, problem="got None")
        found = rejects(WrongInputError, "check_out_tensor: tensor_type", made.check_out_tensor, "label", "Train")
        assert (found.field, found.received) == ("tensor_type", "Train")
        found = rejects(
            WrongInputError, "check_out_tensor: tensor_name", made.check_out_tensor, "x", hugectr.Tensor_t.Train
        )
        assert (found.field, found.received) == ("tensor_name", "x")
        for name in ("embedding_dump", "embedding_load"):
            rejects(IllegalCallError, name, getattr(made, name), "folder")

    @pytest.mark.parametrize(
        ("name", "where"),
        [("a.b", "GraphEmbedding.name"), ("", "DynamicTableSpec.name"), ("training", "embedding name")],
    )
    def test_names_that_embeddings_cannot_have(self, few, name, where):
        made = model(few, few, **SMALL)
        embed(made, name, 8)
        rejects(WrongInputError, f"compile: {where}", to_loss, made, "dense", problem=f"got '{name}'")


@pytest.mark.parametrize(
    ("error", "found", "problem"),
    [
        (OSError("no driver\n  in /usr/lib\n"), FileCannotOpenError, "no driver in /usr/lib, expected"),
        (MissingDependencyError("s3://bucket: Install s3fs"), InvalidEnvError, "s3://bucket: Install s3fs"),
        (NoSpaceError("2 bytes requested, 1 available"), OutOfMemoryError, "2 bytes requested"),
        (StorageError("is open for reading only"), StoreError, "is open for reading only"),
    ],
)
def test_what_file_systems_tell_is_one_line_of_the_facade(error, found, problem):
    def opened():
        with as_hugectr_errors("set_source"):
            raise error

    rejects(found, "set_source", opened, problem=problem)


def test_a_database_that_cannot_be_opened_is_no_lack_of_memory(tmp_path):
    RocksDBStore(tmp_path / "rows", row_bytes=16).close()
    (tmp_path / "rows" / "CURRENT").write_text("nothing\n")

    def opened():
        with as_hugectr_errors("HPS"):
            RocksDBStore.open(tmp_path / "rows")

    rejects(StoreError, f"HPS: {tmp_path / 'rows'}", opened, problem="RocksDB cannot open it")


@pytest.mark.parametrize("name", ["keys", "values", "items", "forward"])
def test_embeddings_may_be_named_like_what_containers_have(few, tmp_path, name):
    made = model(few, few, **SMALL)
    embed(made, name, 8)
    layer(made, Layer.Reshape, name, "flat", leading_dim=32)
    made = started(to_loss(made, "flat"))
    assert made.train()
    made.save_params_to_files(f"{tmp_path}/", 1)
    made.load_sparse_weights({name: f"{tmp_path}/0_sparse_1.model"})
    assert made.train()


def test_data_of_less_than_a_batch_is_warned_of(few, caplog):
    """Finding N14: the epoch has no iteration, as in HugeCTR, and one line says so."""
    made = dcn(few, few, repeat_dataset=False, **{**SMALL, "batchsize": 201})
    made.fit(num_epochs=2, display=1, eval_interval=10, snapshot=0)
    assert [record.name for record in caplog.records] == ["terarec.hugectr.fitting"]
    assert few in caplog.text
