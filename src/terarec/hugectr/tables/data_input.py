"""Input and DataReaderSparseParam, in all their forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from terarec.hugectr.enums import Check_t, DataReaderSparse_t, DataReaderType_t
from terarec.hugectr.tables.kinds import TEXT, TRUTH, instance, listed, member, number, one_or_list, whole
from terarec.hugectr.tables.reader import (
    DATA_READER_PARAMS,
    NUM_WORKERS,
    READ_BY_ALL,
    SLOT_SIZES,
    samples_are_counted,
)
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.table import Parameter, Table


def _every_slot_has_a_number(values: Mapping[str, Any]) -> str | None:
    hotness, slots = values["nnz_per_slot"], values["slot_num"]
    if len(hotness) not in (1, slots):
        return f"nnz_per_slot: got {len(hotness)} numbers, expected one, or one for each of the {slots} slots"
    return None


DATA_READER_SPARSE_PARAM = Table(
    name="DataReaderSparseParam",
    meaning="slots of the data that one name stands for",
    rows=(
        Parameter(name="top_name", kind=TEXT, meaning="name that embeddings read"),
        Parameter(
            name="nnz_per_slot",
            kind=one_or_list(whole(1)),
            meaning="keys of a slot: exactly (is_fixed_length) or at most; one number or one for each slot",
        ),
        Parameter(name="is_fixed_length", kind=TRUTH, meaning="every sample has exactly nnz_per_slot keys"),
        Parameter(name="slot_num", kind=whole(1), meaning="number of slots"),
    ),
    rules=(_every_slot_has_a_number,),
    derive=lambda values: {"nnz_per_slot": _for_each_slot(values["nnz_per_slot"], values["slot_num"])},
)


def _for_each_slot(hotness: Sequence[int], slots: int) -> list[int]:
    return [*hotness] * slots if len(hotness) == 1 else [*hotness]


def _starts_with_a_type(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(args and isinstance(args[0], DataReaderSparse_t)) or "max_feature_num" in kwargs


DATA_READER_SPARSE_PARAM_3_0 = Table(
    name="DataReaderSparseParam",
    meaning="slots of the data (2.3 and 3.0); Input.sparse_names names them",
    rows=(
        Parameter(name="type", kind=member(DataReaderSparse_t), until="3.0", meaning="how GPUs share the keys"),
        Parameter(name="max_feature_num", kind=whole(1), until="3.0", meaning="keys of a sample, at most"),
        Parameter(name="max_nnz", kind=whole(1), until="3.0", meaning="keys of a slot, at most"),
        Parameter(name="slot_num", kind=whole(1), meaning="number of slots"),
    ),
    fits=_starts_with_a_type,
    derive=lambda values: {
        "nnz_per_slot": [values["max_nnz"]] * values["slot_num"],
        "is_fixed_length": False,
        "top_name": "",
    },
)
_SPELLED = tuple(
    replace(row, name="sparse_name") if row.name == "top_name" else row for row in DATA_READER_SPARSE_PARAM.rows
)
# The documents of HugeCTR call the first parameter sparse_name.
DATA_READER_SPARSE_PARAM_DOCUMENTED = replace(
    DATA_READER_SPARSE_PARAM,
    rows=_SPELLED,
    fits=lambda args, kwargs: "sparse_name" in kwargs,
    derive=lambda values: {**DATA_READER_SPARSE_PARAM.derive(values), "top_name": values["sparse_name"]},
)


class DataReaderSparseParam(
    Record,
    forms=(DATA_READER_SPARSE_PARAM, DATA_READER_SPARSE_PARAM_3_0, DATA_READER_SPARSE_PARAM_DOCUMENTED),
):
    """Slots that one name stands for; ``nnz_per_slot`` always has a number for each slot."""


_SPARSE = Parameter(
    name="data_reader_sparse_param_array",
    kind=listed(instance(DataReaderSparseParam)),
    meaning="the sparse inputs, in the order of the data's categorical columns",
)
_DENSE = (
    Parameter(name="dense_dim", kind=whole(0), meaning="number of dense values; may be 0"),
    Parameter(name="dense_name", kind=TEXT, meaning="name of their tensor"),
)
_LABEL = (
    Parameter(name="label_dim", kind=whole(1), meaning="number of labels"),
    Parameter(name="label_name", kind=TEXT, meaning="name of their tensor"),
)


def _one_label(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"label_dims": [values["label_dim"]], "label_names": [values["label_name"]], "label_weights": [1.0]}


INPUT = Table(
    name="Input",
    meaning="the tensors that the data gives",
    rows=(*_LABEL, *_DENSE, _SPARSE),
    derive=_one_label,
)


def _names_match_dims(values: Mapping[str, Any]) -> str | None:
    names, dims = values["label_names"], values["label_dims"]
    weights = values.get("label_weights", dims)
    if len(names) != len(dims) or len(set(names)) != len(names):
        return f"label_names: got {names}, expected a distinct name for each of the {len(dims)} label_dims"
    if len(weights) != len(dims):
        return f"label_weights: got {len(weights)} numbers, expected one for each of the {len(dims)} label_dims"
    return None


def _has_tasks(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return "label_dims" in kwargs or bool(args and isinstance(args[0], list | tuple))


def _has_weights(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    has_weights = "label_weights" in kwargs or (len(args) > 2 and isinstance(args[2], list | tuple))
    return _has_tasks(args, kwargs) and has_weights


_LABELS = (
    Parameter(name="label_dims", kind=listed(whole(1)), since="3.5", meaning="number of labels of every task"),
    Parameter(name="label_names", kind=listed(TEXT), since="3.5", meaning="names of their tensors"),
)
_WEIGHTS = Parameter(name="label_weights", kind=listed(number()), since="3.5", meaning="weight of every task's loss")
_SPARSE_NAMES = Parameter(
    name="sparse_names", kind=listed(TEXT), since="3.0", until="3.1", meaning="names of the sparse inputs"
)


def _names_match_inputs(values: Mapping[str, Any]) -> str | None:
    names, inputs = values["sparse_names"], values["data_reader_sparse_param_array"]
    if len(names) != len(inputs):
        return f"sparse_names: got {names}, expected a name for each of the {len(inputs)} sparse inputs"
    return None


INPUT_WEIGHTED_TASKS = Table(
    name="Input",
    meaning="the tensors that the data gives, with several tasks and their weights",
    rows=(*_LABELS, _WEIGHTS, *_DENSE, _SPARSE),
    rules=(_names_match_dims,),
    fits=_has_weights,
)
INPUT_TASKS = Table(
    name="Input",
    meaning="the tensors that the data gives, with several tasks",
    rows=(*_LABELS, *_DENSE, _SPARSE),
    rules=(_names_match_dims,),
    fits=_has_tasks,
    derive=lambda values: {"label_weights": [1.0] * len(values["label_dims"])},
)
INPUT_NAMED = Table(
    name="Input",
    meaning="the tensors that the data gives, with sparse inputs that have no names of their own (3.1)",
    rows=(*_LABEL, *_DENSE, _SPARSE, _SPARSE_NAMES),
    rules=(_names_match_inputs,),
    fits=lambda args, kwargs: "sparse_names" in kwargs and "data_reader_type" not in kwargs,
    derive=lambda values: {**_one_label(values), "data_reader_sparse_param_array": _named(values)},
)
_OLD_COUNTS = tuple(replace(row, until="3.0") for row in READ_BY_ALL)

INPUT_WITH_READER = Table(
    name="Input",
    meaning="the tensors that the data gives, and the data (3.0)",
    rows=(
        Parameter(name="data_reader_type", kind=member(DataReaderType_t), until="3.0", meaning="format of the files"),
        Parameter(name="source", kind=one_or_list(TEXT), until="3.0", meaning="training data"),
        Parameter(name="eval_source", kind=TEXT, until="3.0", meaning="evaluation data"),
        Parameter(name="check_type", kind=member(Check_t), until="3.0", meaning="whether records have checksums"),
        _OLD_COUNTS[0],
        *_LABEL,
        *_DENSE,
        *_OLD_COUNTS[1:-1],
        replace(_OLD_COUNTS[-1], default=True),
        replace(NUM_WORKERS, until="3.0"),
        replace(SLOT_SIZES, until="3.0"),
        _SPARSE,
        _SPARSE_NAMES,
    ),
    rules=(samples_are_counted, _names_match_inputs),
    fits=lambda args, kwargs: "data_reader_type" in kwargs or bool(args and isinstance(args[0], DataReaderType_t)),
    derive=lambda values: {
        **{row.name: row.default for row in DATA_READER_PARAMS.rows if row.name not in values},
        **_one_label(values),
        "data_reader_sparse_param_array": _named(values),
    },
)


def _named(values: Mapping[str, Any]) -> list[DataReaderSparseParam]:
    pairs = zip(values["sparse_names"], values["data_reader_sparse_param_array"], strict=True)
    return [
        DataReaderSparseParam(name, slots.nnz_per_slot, slots.is_fixed_length, slots.slot_num) for name, slots in pairs
    ]


class Input(Record, forms=(INPUT, INPUT_WEIGHTED_TASKS, INPUT_TASKS, INPUT_NAMED, INPUT_WITH_READER)):
    """The tensors that the data gives; every form has ``label_dims``, ``label_names`` and ``label_weights``."""
