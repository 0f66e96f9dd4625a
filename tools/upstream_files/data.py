# SPDX-License-Identifier: Apache-2.0
"""Data in the layout that a script of HugeCTR reads, by terarec's own generators; labels follow a planted model."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from terarec.apps.synthetic.records import RecordGenerator, generate_records
from terarec.data.records import NormSource, ParquetSource, RecordReader
from terarec.formats.dataset import METADATA_FILE
from terarec.formats.hugectr.split_writer import write_keyset
from terarec.spec import RecordLayout, SparseInput

KEYS_OF_A_SLOT = 1_000
"""Where a script says nothing about a slot's keys."""
LEAST_ROWS = 2_048

COLUMN_ORDERS = (
    ("*movie_len*", "keys, unused, labels"),
    ("*din_data*", "keys, labels"),
    ("*bst_data*", "labels, keys, numbers"),
)
"""Patterns of folders of Parquet files that upstream's tests read by the position of columns -> their order."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Data files that were written.

    Attributes:
        source: List or file that a script names.
        files: Data files.
        note: One line for the report.
    """

    source: Path
    files: tuple[Path, ...]
    note: str


def generate(demands: Sequence[Mapping[str, Any]], folder: Path, least_rows: int = LEAST_ROWS) -> list[Generated]:
    """Write what is missing of the data that `demands` (see `probe.Demand`) name, relative to `folder`."""
    written: list[Generated] = []
    for demand in demands:
        generator = _generator(demand)
        sources = [(source, demand["rows"]) for source in demand["sources"]]
        for source, rows in (*sources, (demand["eval_source"], demand["eval_rows"])):
            path = folder / source
            if source and not path.exists():
                # Raw files have exactly the samples that the script names.
                rows = rows if demand["kind"] in ("raw", "raw_async") else max(rows, least_rows)
                written.append(_write(generator, path, rows, is_eval=source == demand["eval_source"]))
        for source, keyset in zip(demand["sources"], demand["keysets"], strict=False):  # without a cache none has one
            if not (folder / keyset).exists():
                _write_keyset(demand, generator, folder / source, folder / keyset)
    return written


def _generator(demand: Mapping[str, Any]) -> RecordGenerator:
    nnz = tuple(demand["nnz"])
    sizes = list(demand["slot_sizes"]) or [KEYS_OF_A_SLOT] * len(nnz)
    sizes = (sizes + [KEYS_OF_A_SLOT] * len(nnz))[: len(nnz)]
    # A slot of size 0 shares the keys of the next one that has a size.
    for slot in reversed(range(len(sizes) - 1)):
        sizes[slot] = sizes[slot] or sizes[slot + 1]
    layout = RecordLayout(
        label_dim=demand["label_dim"],
        dense_dim=demand["dense_dim"],
        inputs=(SparseInput(name="data", nnz_per_slot=nnz, is_fixed_length=demand["is_fixed"]),),
        key_bytes=demand["key_bytes"],
        slot_sizes=tuple(max(1, size) for size in sizes),
    )
    return RecordGenerator(
        kind=demand["kind"],
        layout=layout,
        checksum=demand["checksum"],
        float_label_dense=demand["is_float"],
        is_length_random=not demand["is_fixed"],
        is_planted=True,
    )


def _split(path: Path, *, is_eval: bool) -> str:
    """Return the name of a list's data folder: a name of its own for each of several lists in a folder."""
    usual = {"file_list": "train", "file_list_test": "val"}
    return usual.get(path.stem, f"{path.stem.strip('_')}_files") if not is_eval else usual.get(path.stem, "val_files")


def _write(generator: RecordGenerator, path: Path, rows: int, *, is_eval: bool) -> Generated:
    path.parent.mkdir(parents=True, exist_ok=True)
    split = _split(path, is_eval=is_eval)
    records = generate_records(generator, path, split=split, rows_per_file=rows)
    files = tuple(map(Path, records.files))
    if generator.kind == "parquet":
        order = next((order for pattern, order in COLUMN_ORDERS if fnmatch.fnmatch(str(path), pattern)), None)
        if order is not None:
            _reorder(files, order)
    slots = len(generator.layout.slot_sizes)
    note = f"{path.name}: {generator.kind}, {rows:,} samples of {slots} slots, {generator.layout.dense_dim} numbers"
    return Generated(path, files, note)


def _reorder(files: Sequence[Path], order: str) -> None:
    """Write the columns of Parquet files in another order, and their positions into the metadata."""
    description = files[0].parent / METADATA_FILE
    metadata = json.loads(description.read_text())
    for file in files:
        table = pq.read_table(file)
        names = {
            "keys": [column["col_name"] for column in metadata["cats"]],
            "labels": [column["col_name"] for column in metadata["labels"]],
            "numbers": [column["col_name"] for column in metadata["conts"]],
        }
        columns: list[str] = []
        for part in order.split(", "):
            if part == "unused":
                table = table.append_column("unused", pa.array(np.zeros(len(table), np.float32)))
                columns.append("unused")
            else:
                columns += names.pop(part)
        columns += [name for part in names.values() for name in part]
        pq.write_table(table.select(columns), file)
    for part in ("cats", "labels", "conts"):
        for column in metadata[part]:
            column["index"] = columns.index(column["col_name"])
    description.write_text(json.dumps(metadata))


def _write_keyset(demand: Mapping[str, Any], generator: RecordGenerator, source: Path, keyset: Path) -> None:
    """Write the keys that a reader finds in a source."""
    layout = dataclasses.replace(generator.layout, slot_sizes=tuple(demand["slot_sizes"]))
    is_norm = generator.kind == "norm"
    file = NormSource(source, layout, checksum=generator.checksum) if is_norm else ParquetSource(source, layout)
    reader = RecordReader(file, batch_size=LEAST_ROWS, repeat=False, drop_last=False, threads=1)
    keys = np.unique(np.concatenate([batch.sparse.keys.numpy() for batch in reader]))
    reader.close()
    write_keyset(keyset, keys, layout.key_bytes)


def place_named_files(names: Sequence[str], generated: Sequence[Generated], folder: Path) -> list[str]:
    """Copy data files to the names under which scripts open them themselves; return a line for each.

    Args:
        names: Paths of data files that scripts name.
        generated: What was generated; the last in the same folder, or above it, is copied.
        folder: Working directory of the scripts.
    """
    lines = []
    for name in names:
        path = folder / name
        if path.exists():
            continue
        near = [one for one in generated if path.resolve().is_relative_to(one.source.resolve().parent)]
        near = [one for one in near if (one.files and one.files[0].suffix == path.suffix) or path.suffix == ".dat"]
        if near:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(near[-1].files[0], path)
            lines.append(f"{name}: a copy of {near[-1].files[0].name}")
    return lines
