"""tools.DataGeneratorParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terarec.hugectr.enums import Check_t, DataReaderType_t, Distribution_t, PowerLaw_t
from terarec.hugectr.tables.kinds import TEXT, TRUTH, listed, member, number, whole
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.table import Parameter, Status, Table


def _sizes_match(values: Mapping[str, Any]) -> str | None:
    for name in ("slot_size_array", "nnz_array"):
        if len(values[name]) != values["num_slot"] and (values[name] or name == "slot_size_array"):
            return f"{name}: got {len(values[name])} numbers, expected one for each of the {values['num_slot']} slots"
    return None


def _row(name: str, kind: Any, meaning: str, **rest: Any) -> Parameter:
    return Parameter(name=name, kind=kind, meaning=meaning, since="3.2", **rest)


DATA_GENERATOR_PARAMS = Table(
    name="tools.DataGeneratorParams",
    meaning="random data of a layout",
    rows=(
        _row("format", member(DataReaderType_t), "format of the files"),
        _row("label_dim", whole(1), "labels"),
        _row("dense_dim", whole(0), "dense values"),
        _row("num_slot", whole(1), "slots"),
        _row("i64_input_key", TRUTH, "keys of 64 bits, else 32"),
        _row("source", TEXT, "file list or file of the training data"),
        _row("eval_source", TEXT, "file list or file of the evaluation data"),
        _row("slot_size_array", listed(whole(1)), "keys of every slot"),
        _row("nnz_array", listed(whole(1)), "keys of a sample in every slot; none: one", default=[]),
        _row("check_type", member(Check_t), "checksums in Norm files", default=Check_t.Sum),
        _row("dist_type", member(Distribution_t), "distribution of the keys", default=Distribution_t.PowerLaw),
        _row("power_law_type", member(PowerLaw_t), "exponent", default=PowerLaw_t.Specific),
        _row("alpha", number(0.0), "exponent of PowerLaw_t.Specific", default=1.2),
        _row("num_files", whole(1), "training files", default=128),
        _row("eval_num_files", whole(1), "evaluation files", default=32),
        _row("num_samples_per_file", whole(1), "samples of a file (Norm, Parquet)", default=40960),
        _row("num_samples", whole(1), "training samples (Raw)", default=5242880),
        _row("eval_num_samples", whole(1), "evaluation samples (Raw)", default=1310720),
        _row("float_label_dense", TRUTH, "Raw with labels and dense values as float32", default=False),
        _row(
            "num_threads",
            whole(1),
            "threads that write",
            default=1,
            status=Status.IGNORED,
            why="the files are the same",
        ),
        _row(
            "random_nnz",
            TRUTH,
            "terarec's own: Norm files with 1 to nnz_array's number of keys, as Parquet files have; False: that number",
            default=False,
            is_positional=False,
        ),
    ),
    rules=(_sizes_match,),
)


class DataGeneratorParams(Record, forms=(DATA_GENERATOR_PARAMS,)):
    """Random data of a layout; every argument is an attribute."""
