# SPDX-License-Identifier: Apache-2.0
"""A graph's JSON with dense and sparse files, which HugeCTR or the facade saved, as a RUN."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path

from torch import Tensor

from terarec.errors import ConfigError
from terarec.formats.hugectr.records import read_records
from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.enums import Alignment_t, Check_t
from terarec.hugectr.graph_json import Part, read_graph
from terarec.hugectr.json_files import read_json, read_optimizer
from terarec.hugectr.model import Model
from terarec.hugectr.objects import AsyncParam, DataReaderParams, OptParamsPy, Solver, SparseEmbedding
from terarec.hugectr.readers import KIND_OF_READER
from terarec.hugectr.run import save_run
from terarec.io.remote import is_remote
from terarec.spec import RecordLayout, RecordsSpec
from terarec.spec.preparation import SavedModel

_READER_TYPES = {kind: reader_type for reader_type, kind in KIND_OF_READER.items()}


def convert_model(saved: SavedModel, out: Path) -> Model:
    """Write the RUN of a saved model.

    The optimizer of the layers is that of the graph file's clause ``optimizer``, or else of its first embedding.

    Args:
        saved: The model.
        out: A new or empty directory.

    Returns:
        The model.

    Raises:
        DataNotFoundError: A file is missing.
        FormatError: A file is damaged, or of another model.
        ConfigError: Files, data and graph that do not fit together, or a directory that holds something else.
        StorageError: The disk is full, or there is not enough memory for the tables.
    """
    records = read_records(saved.records)
    with contextlib.redirect_stdout(io.StringIO()):  # the message about devices
        model = _compiled(saved, records)
        _check_layout(model._compiled("convert").layout, records.layout)
        _load(model, saved)
        _go_on_from(model, saved)
        described, training = model.run_parts()
        names = dataclasses.replace(described, label_names=records.label_names, dense_names=records.dense_names)
        save_run(out, names, training)
    return model


def _compiled(saved: SavedModel, records: RecordsSpec) -> Model:
    # Read twice: an object notes which of its keys were taken, and the graph passes over `optimizer`.
    data = read_json(str(saved.graph))
    parts = read_graph(read_json(str(saved.graph))).parts
    optimizer = read_optimizer(data.child("optimizer")) if data.has("optimizer") else _optimizer_of(parts)
    solver = Solver(
        seed=saved.seed,
        lr=saved.lr,
        batchsize=saved.batch_size,
        batchsize_eval=saved.batch_size,
        vvgpu=[[0]],
        i64_input_key=records.layout.key_bytes == 8,
        use_embedding_collection=any(isinstance(part, EmbeddingCollectionConfig) for part in parts),
    )
    model = Model(solver, _reader(saved.records, records), optimizer)
    for part in parts:
        model.add(part)
    model.compile()
    return model


def _optimizer_of(parts: tuple[Part, ...]) -> OptParamsPy:
    """Return the optimizer of the first embedding or table that names one; Adam without any."""
    named: list[OptParamsPy | None] = []
    for part in parts:
        if isinstance(part, SparseEmbedding):
            named.append(part.optimizer)
        elif isinstance(part, EmbeddingCollectionConfig):
            named += [lookup.table.opt_params for lookup in part.lookups]
    return next((params for params in named if params is not None), OptParamsPy())


def _reader(path: Path, records: RecordsSpec) -> DataReaderParams:
    def where(split: str) -> str:
        split_path = records.split(split).path
        return split_path if is_remote(split_path) else str((path.absolute().parent / split_path).absolute())

    evaluated = "valid" if "valid" in records.splits else "train"
    return DataReaderParams(
        data_reader_type=_READER_TYPES[records.kind],
        source=[where("train")],
        eval_source=where(evaluated),
        check_type=Check_t.Sum if records.checksum else Check_t.Non,
        num_samples=records.split("train").rows,
        eval_num_samples=records.split(evaluated).rows,
        float_label_dense=records.float_label_dense,
        num_workers=1,
        slot_size_array=list(records.layout.slot_sizes),
        # Only the last two count, the layout of the files; the others are about requests to the disk.
        async_param=AsyncParam(1, 4, 0, 0, 0, False, Alignment_t.Non, records.multi_hot, records.float_label_dense),
    )


def _check_layout(graph: RecordLayout, records: RecordLayout) -> None:
    for what in ("label_dim", "dense_dim", "most_keys"):
        got, expected = getattr(graph, what), getattr(records, what)
        if got != expected:
            raise ConfigError("graph", f"its data layer has the {what} {got}, expected {expected} as in records.json")


def _load(model: Model, saved: SavedModel) -> None:
    model.load_dense_weights(str(saved.dense))
    sparse = list(map(str, saved.sparse))
    if model.solver.use_embedding_collection:
        if len(sparse) != 1:
            raise ConfigError("sparse", f"got {len(sparse)} paths, expected one, the dump of the embedding collections")
        model.embedding_load(sparse[0])
    else:
        model.load_sparse_weights(sparse)
    if saved.dense_states is not None:
        model.load_dense_optimizer_states(str(saved.dense_states))
    if saved.sparse_states:
        model.load_sparse_optimizer_states(list(map(str, saved.sparse_states)))


def _go_on_from(model: Model, saved: SavedModel) -> None:
    """Set the number of steps to that of the files, and skip the batches of these steps."""
    compiled = model._compiled("convert")
    trainer, reader = compiled.trainer, compiled.train_reader
    model.start_data_reading()
    samples = saved.step * saved.batch_size
    rows = sum(reader.open_source().group_rows)
    # A position is counted in records, so the batches behind the files need not be read.
    reader.load_state_dict({**reader.state_dict(), "epoch": samples // rows, "rows_read": samples % rows})
    trainer.step, trainer.samples = saved.step, samples
    if saved.dense_states is not None and trainer.optimizers.dense is not None:
        # The bias correction of Adam depends on the step, which no file of HugeCTR holds.
        for state in trainer.optimizers.dense.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(saved.step)
        # Optimizers of terarec count steps in their groups, torch's in the state of each weight.
        for group in trainer.optimizers.dense.param_groups:
            if "num_steps" in group:
                group["num_steps"] = saved.step
    if saved.sparse_states and trainer.optimizers.rows is not None:
        progress = {name: value for name, value in trainer.optimizers.rows.step_state().items() if name != "rule_steps"}
        trainer.optimizers.rows.load_step_state({**progress, "num_steps": saved.step})
