# SPDX-License-Identifier: Apache-2.0
"""``terarec convert`` there and back, and what it rejects."""

from pathlib import Path

import numpy as np

from terarec.checkpoint import load
from terarec.config import load_run
from terarec.data import Reader
from terarec.errors import DataNotFoundError, FormatError
from terarec.formats import read_dataset
from terarec.formats.hugectr.weights import open_sparse_folder
from terarec.models.artifact import find_checkpoint, load_model, tables
from terarec.tensorflow.sok_files import KEY, WEIGHT, header_of
from tests.cli.conftest import Workshop, figures, rejected, terarec
from tests.data.sources import assert_same_batches
from tests.formats.samples import METADATA, make_block, make_spec, write_split


def test_there_and_back(workshop: Workshop, tmp_path: Path) -> None:
    made = figures("convert", workshop.data, "--to", "norm", "--out", tmp_path / "norm", "--keysets", "--key-bytes", 8)
    assert (made["kind"], made["rows"], made["key_bytes"]) == ("norm", 2000, 8)
    assert len(made["slot_sizes"]) == 26
    assert (tmp_path / "norm" / "train" / "_hugectr.keyset").stat().st_size % 8 == 0
    back = figures("convert", tmp_path / "norm", "--to", "dataset", "--out", tmp_path / "again", "--format", "raw")
    assert (back["rows"], back["skipped_rows"]) == (2000, 0)
    for split in ("train", "valid"):
        found, expected = (list(Reader(path, split, batch_size=500)) for path in (tmp_path / "again", workshop.data))
        assert_same_batches(found, expected)


def test_columns_that_the_files_cannot_hold_are_left_out_and_named(tmp_path: Path) -> None:
    spec = make_spec(hotness=(1,), weight="w", metadata=METADATA)
    write_split(tmp_path / "data", spec, make_block(spec, 20))
    ended = terarec("convert", tmp_path / "data", "--to", "parquet", "--out", tmp_path / "files")
    assert ended.code == 0
    reported = [line for line in ended.out.splitlines() if "left out" in line]
    assert reported == ["left out, as HugeCTR's files hold neither weights nor metadata: w, row, price, note"]
    figures("convert", tmp_path / "files", "--to", "dataset", "--out", tmp_path / "again")
    again = read_dataset(tmp_path / "again")
    assert (again.weight, again.metadata) == (None, ())
    assert again.num_rows("train") == 20


def test_what_is_rejected(workshop: Workshop, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "x")
    rejected("convert", workshop.data, "--to", "csv", *out, where="--to", problem="got 'csv'")
    for flags in (
        ("--to", "raw", "--no-checksum"),
        ("--to", "dataset", "--keysets"),
        ("--to", "norm", "--format", "raw"),
    ):
        rejected("convert", workshop.data, *flags, *out, where=flags[2], problem=" ".join(flags[:2]))
    rejected("convert", workshop.data, "--to", "norm", "--key-bytes", 5, *out, where="--key-bytes", problem="got 5")
    rejected("convert", tmp_path, "--to", "norm", *out, error=DataNotFoundError, where=tmp_path, problem="dataset.json")
    rejected(
        "convert", workshop.data, "--to", "dataset", *out, error=DataNotFoundError, where=workshop.data / "records.json"
    )
    assert not (tmp_path / "x").exists()


def test_tables_become_files_of_sok_and_models_of_hugectr(workshop: Workshop, tmp_path: Path) -> None:
    made = figures("convert", workshop.run, "--to", "sok", "--out", tmp_path / "sok")
    held = tables(load_model(workshop.run).model)
    assert (made["kind"], made["tables"], made["table_rows"]) == ("sok", len(held), sum(map(len, held.values())))
    models = figures("convert", tmp_path / "sok", "--to", "sparse", "--out", tmp_path / "models")
    assert models["table_rows"] == made["table_rows"]
    for name, table in held.items():
        rows = table.export(table.keys())
        header = f"{name:>256}".encode() + bytes(4) + b" " * 32
        content = (tmp_path / "sok" / f"{name}_0-key").read_bytes()
        assert content[:296] == header + (1).to_bytes(4, "big")
        keys = np.frombuffer(content[296:], "<i8")
        vectors = np.fromfile(tmp_path / "sok" / f"{name}_0-weight", "<f4", offset=296).reshape(len(table), -1)
        np.testing.assert_array_equal(keys[np.argsort(keys)], rows.keys.sort().values)
        np.testing.assert_array_equal(vectors[np.argsort(keys)], rows.weights[rows.keys.argsort()])
        (piece,) = load(find_checkpoint(workshop.run, load_run(workshop.run / "run.json"))).table_files().pieces(name)
        sums = np.fromfile(tmp_path / "sok" / f"{name}_0-Adagrad-accumulator", "<f4", offset=296).reshape(vectors.shape)
        rows_with_states = piece.get("keys", np.arange(len(piece["state.sum"])))
        kept = dict(zip(rows_with_states.tolist(), piece["state.sum"], strict=True))
        np.testing.assert_array_equal(sums, [kept.get(key, np.zeros(table.width)) for key in keys.tolist()])
        assert sums.any()
        folder = open_sparse_folder(tmp_path / "models" / name, table.width)
        np.testing.assert_array_equal(folder.keys(), keys)
        np.testing.assert_array_equal(np.concatenate([chunk.vectors for chunk in folder.chunks()]), vectors)
    rejected(
        *("convert", tmp_path / "models", "--to", "sparse", "--out", tmp_path / "x"),
        error=DataNotFoundError,
        where=tmp_path / "models",
    )
    (tmp_path / "sok" / "C1_0-weight").write_bytes(content)
    rejected("convert", tmp_path / "sok", "--to", "sparse", "--out", tmp_path / "x", error=FormatError)
    # Only a run may name code.
    allowed = ("--allow-import", "shop", "--out", tmp_path / "y")
    rejected("convert", tmp_path / "sok", "--to", "sparse", *allowed, where="--allow-import", problem="no meaning")
    assert figures("convert", workshop.run, "--to", "sok", *allowed)["tables"] == len(held)
    assert not (tmp_path / "x").exists()


def test_tables_of_sok_have_the_names_that_their_files_say(tmp_path: Path) -> None:
    def write(folder: str, *tables: tuple[str, str]) -> Path:
        """Write files whose names begin in one way and whose headers have a table's name."""
        (tmp_path / folder).mkdir()
        for file, name in tables:
            key, weight = header_of(name, KEY, "", np.dtype("i8")), header_of(name, WEIGHT, "", np.dtype("f4"))
            (tmp_path / folder / f"{file}-key").write_bytes(key + bytes(8))
            (tmp_path / folder / f"{file}-weight").write_bytes(weight + bytes(8))
        return tmp_path / folder

    for number, names in enumerate(
        ([("n_0", "n"), ("n_0_0", "n_0")], [("n", "n"), ("n_0", "n_0")], [("n_0", ""), ("n_0_0", "")])
    ):
        out = tmp_path / f"models {number}"
        figures("convert", write(str(number), *names), "--to", "sparse", "--out", out)
        assert {path.name for path in out.iterdir()} == {"n", "n_0"}
    again = ("convert", write("two", ("n", "n"), ("n_0", "n")), "--to", "sparse", "--out", tmp_path / "x")
    rejected(*again, error=FormatError, where=tmp_path / "two" / "n_0-key")
