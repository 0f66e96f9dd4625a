# SPDX-License-Identifier: Apache-2.0
"""A run that suits a data set, to start from and to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from terarec.errors import ConfigError
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DIENSpec,
    DynamicTableSpec,
    DynamicTablesSpec,
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphModelSpec,
    GraphSpec,
    NegativesSpec,
    PythonModelSpec,
    RunSpec,
    TableSpec,
    TargetHistory,
    TrainingSpec,
    TwoTowerSpec,
)
from terarec.spec.histories import HistoriesSpec, HSTURankerSpec
from terarec.spec.model import ModelSpec
from terarec.spec.retrieval import MultVAESpec, PairSpec, YouTubeDNNSpec
from terarec.spec.sequences import SequenceSpec

STEPS_OF_AN_EPOCH = 100
"""Least number of steps of an epoch, as far as `SMALLEST_BATCH` allows."""
SMALLEST_BATCH = 16

FACTORY = "your_package.models:build_model"
"""Placeholder for the factory of a Python model without a name."""

_WIDTH, _HIDDEN = 16, 64
_USER_WORDS = {"user", "users", "uid", "visitor", "customer", "member", "reader", "viewer", "session", "person"}
_ITEM_WORDS = {
    *("item", "items", "iid", "product", "movie", "ad", "news", "video", "song", "track", "article", "book"),
    *("asin", "campaign", "creative", "doc", "genre", "genres", "brand", "category"),
}


def _nothing(name: str) -> frozenset[str]:
    return frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnRelations:
    """What data show about their columns.

    Attributes:
        vocabularies: Column -> number of its vocabulary, where it is known.
        determined_by: Function that returns the columns that have one value for each value of a column.
    """

    vocabularies: Mapping[str, int] = field(default_factory=dict)
    determined_by: Callable[[str], frozenset[str]] = _nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingRun:
    """Run to start from.

    Attributes:
        run: The run.
        remarks: Dotted path of a field -> why it has its value.
        open_fields: Dotted paths of fields whose value must be replaced before the run can be trained.
    """

    run: RunSpec
    remarks: dict[str, str] = field(default_factory=dict)
    open_fields: tuple[str, ...] = ()


def starting_run(
    model: type[ModelSpec],
    dataset: DatasetSpec,
    data: str,
    *,
    factory: str | None = None,
    relations: ColumnRelations | None = None,
) -> StartingRun:
    """Build a run of a type of model from its defaults and from the data.

    Args:
        model: Class of the model's spec.
        dataset: Columns and splits of the data.
        data: Path of the data as the run is to name it.
        factory: ``package.module:name`` of a Python model.
        relations: What the data show about their columns; None for nothing.

    Raises:
        ConfigError: `factory` is no such name, or the data have more labels than the model takes.
    """
    remarks: dict[str, str] = {}
    described, open_fields = _model(model, dataset, factory, relations or ColumnRelations(), remarks)
    tables = getattr(described, "tables", None)
    # A static table has as many rows as ids; raw integers have no such number.
    columns = dataset.categorical if open_fields else _looked_up(described, dataset)
    if tables is not None and any(column.rows is None for column in columns):
        scale = tables.init_scale or DynamicTablesSpec().init_scale
        dynamic = DynamicTablesSpec(initializer=tables.initializer, init_scale=scale)
        described = cast(ModelSpec, replace(cast(Any, described), tables=dynamic))
        remarks["model.tables"] = "Dynamic, since the data have columns of any integers as keys."
        if isinstance(described, DIENSpec):
            described = replace(described, negatives=NegativesSpec(draw="batch"))
            remarks["model.negatives"] = "From the batch, since any integers cannot be drawn."
    training = TrainingSpec(batch_size=_batch_size(dataset, remarks), eval_split=_eval_split(dataset, remarks))
    run = RunSpec(data=data, model=described, training=training)
    return StartingRun(run=run, remarks=remarks, open_fields=open_fields)


def _model(
    model: type[ModelSpec],
    dataset: DatasetSpec,
    factory: str | None,
    relations: ColumnRelations,
    remarks: dict[str, str],
) -> tuple[ModelSpec, tuple[str, ...]]:
    labels, of_one = len(dataset.labels), SequenceSpec | YouTubeDNNSpec | MultVAESpec | PairSpec | TwoTowerSpec
    if labels != 1 and issubclass(model, of_one):
        raise ConfigError(model.kind, f"got {labels} labels in {dataset.name!r}, expected 1")
    if issubclass(model, HistoriesSpec):
        pairs = _histories(dataset, relations)
        if pairs:
            remarks["model.sequences"] = "The list columns that share a vocabulary with one column of one key a sample."
            return cast(ModelSpec, model(sequences=pairs[:1] if model is HSTURankerSpec else pairs)), ()
        remarks["model.sequences"] = (
            "Replace both names: no list column is known to share a vocabulary with exactly one column of one key a "
            f"sample (Categorify with joint). The columns are {', '.join(_names(dataset))}."
        )
        placeholder = (TargetHistory(target="TARGET", history="HISTORY"),)
        return cast(ModelSpec, model(sequences=placeholder)), ("model.sequences",)
    if issubclass(model, SequenceSpec | YouTubeDNNSpec | MultVAESpec):
        return _sequence(model, dataset, relations, remarks)
    if issubclass(model, PairSpec):
        return _pair(model, dataset, relations, remarks)
    if model is TwoTowerSpec:
        return _two_tower(dataset, relations, remarks)
    if model is GraphModelSpec:
        return GraphModelSpec(graph=_graph(dataset)), ()
    if model is PythonModelSpec:
        if factory is None:
            remarks["model.factory"] = "Replace it by your own; terarec train needs --allow-import with its package."
        return PythonModelSpec(factory=factory or FACTORY), () if factory else ("model.factory",)
    return model(), ()  # type: ignore[call-arg]  # the other models have a default for every field


def _looked_up(model: ModelSpec, dataset: DatasetSpec) -> Sequence[CategoricalColumn]:
    """Return the columns that have tables: those that the model's fields name, or all where none does."""
    fields = [getattr(model, role, ()) for role in ("user", "item", "history")]
    names = {name for field in fields for name in ((field,) if isinstance(field, str) else field)}
    return [column for column in dataset.categorical if column.name in names] or dataset.categorical


def _pair(
    model: type[PairSpec], dataset: DatasetSpec, relations: ColumnRelations, remarks: dict[str, str]
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Choose the keys of users and of items by their names."""
    user, item = _key(dataset, relations, _USER_WORDS, set()), _key(dataset, relations, _ITEM_WORDS, _USER_WORDS)
    remarks["model.user"] = "The key of users by its name." if user else "Replace it by the column of users."
    remarks["model.item"] = "The key of items by its name." if item else "Replace it by the column of items."
    chosen = {"model.user": user, "model.item": item}
    if None in chosen.values():
        remarks["model.user"] += f" The columns are {', '.join(_names(dataset))}."
    described = model(user=user or "USER", item=item or "ITEM")
    return cast(ModelSpec, described), tuple(path for path, name in chosen.items() if name is None)


def _sequence(
    model: type[SequenceSpec | YouTubeDNNSpec | MultVAESpec],
    dataset: DatasetSpec,
    relations: ColumnRelations,
    remarks: dict[str, str],
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Choose the list column that shares a vocabulary with one column of one key a sample."""
    pairs = _histories(dataset, relations)
    if len(pairs) == 1:
        remarks["model.history"] = "The list column that shares a vocabulary with the item."
        return cast(ModelSpec, model(item=pairs[0].target, history=pairs[0].history)), ()
    known = ", ".join(f"{pair.history} with {pair.target}" for pair in pairs) or "none"
    remarks["model.item"] = "Replace it by the column of the item that follows the history."
    remarks["model.history"] = (
        f"Replace it by a list column of the same vocabulary (Categorify with joint), of which there are: {known}. The "
        f"columns are {', '.join(_names(dataset))}."
    )
    return cast(ModelSpec, model(item="ITEM", history="HISTORY")), ("model.item", "model.history")


def _two_tower(
    dataset: DatasetSpec, relations: ColumnRelations, remarks: dict[str, str]
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Choose the columns that the key of users or the one of items determines, and no others."""
    names = _names(dataset)
    user, item = _key(dataset, relations, _USER_WORDS, set()), _key(dataset, relations, _ITEM_WORDS, _USER_WORDS)
    if user is None or item is None:
        remarks["model.user"] = f"Replace it by the columns of the user. The columns are {', '.join(names)}."
        remarks["model.item"] = "Replace it by the columns of the item."
        return TwoTowerSpec(user=("USER",), item=("ITEM",)), ("model.user", "model.item")
    of_user, of_item = relations.determined_by(user), relations.determined_by(item)
    towers = {
        "user": tuple(name for name in names if name == user or (name in of_user - of_item and name != item)),
        "item": tuple(name for name in names if name == item or (name in of_item - of_user and name != user)),
    }
    for tower, key in (("user", user), ("item", item)):
        remarks[f"model.{tower}"] = f"{key!r} by its name, and the columns that have one value for each of its values."
    model = TwoTowerSpec(user=towers["user"], item=towers["item"], item_key=item)
    rest = [name for name in names if name not in (*model.user, *model.item)]
    if not rest:
        return model, ()
    remarks["model.user"] += (
        f" Replace it if it lacks columns of the user: the data do not show a tower for {', '.join(rest)}."
    )
    return model, ("model.user",)


def _key(dataset: DatasetSpec, relations: ColumnRelations, words: set[str], others: set[str]) -> str | None:
    """Return the column whose name says that it identifies users, or items; None if there is no such one."""
    single = [column.name for column in dataset.categorical if column.hotness == 1]
    columns = [name for name in single if _words(name) & words and not _words(name) & others]
    # Of columns such as item_id and genre the key is the one that determines the others.
    keys = [name for name in columns if set(columns) - {name} <= relations.determined_by(name)]
    return keys[0] if len(keys) == 1 else None


def _histories(dataset: DatasetSpec, relations: ColumnRelations) -> tuple[TargetHistory, ...]:
    """Pair each list column with the one column of one key a sample that shares its vocabulary."""
    pairs = []
    for history in dataset.categorical:
        number = relations.vocabularies.get(history.name)
        targets = [
            column.name
            for column in dataset.categorical
            if column.hotness == 1 and number is not None and relations.vocabularies.get(column.name) == number
        ]
        if history.hotness > 1 and len(targets) == 1:
            pairs.append(TargetHistory(target=targets[0], history=history.name))
    return tuple(pairs)


def _graph(dataset: DatasetSpec) -> GraphSpec:
    """Build an MLP over the dense columns and all embeddings, with a logit and a loss for each label."""
    bottoms = ["dense"] if dataset.dense else []
    embeddings = []
    if dataset.categorical:
        tables = tuple(
            DynamicTableSpec(name=column.name, width=_WIDTH)
            if column.rows is None
            else TableSpec(name=column.name, rows=column.rows, width=_WIDTH)
            for column in dataset.categorical
        )
        features = tuple(GraphFeature(name=column.name, table=column.name) for column in dataset.categorical)
        embeddings = [GraphEmbedding(name="embeddings", tables=tables, features=features, output="flat")]
        bottoms.append("embeddings")
    layers = [
        GraphLayer(kind="concat", bottoms=tuple(bottoms), tops=("inputs",)),
        GraphLayer(kind="inner_product", bottoms=("inputs",), tops=("hidden",), options={"num_output": _HIDDEN}),
        GraphLayer(kind="relu", bottoms=("hidden",), tops=("active",)),
    ]
    for label in dataset.labels:
        logit, loss = f"{label.name}_logit", f"{label.name}_loss"
        layers += [
            GraphLayer(kind="inner_product", bottoms=("active",), tops=(logit,), options={"num_output": 1}),
            GraphLayer(kind="binary_cross_entropy", bottoms=(logit, label.name), tops=(loss,)),
        ]
    return GraphSpec(
        labels=tuple(GraphLabel(name=label.name) for label in dataset.labels),
        dense_dim=len(dataset.dense),
        embeddings=tuple(embeddings),
        layers=tuple(layers),
    )


def _batch_size(dataset: DatasetSpec, remarks: dict[str, str]) -> int:
    default = TrainingSpec().batch_size
    rows = dataset.num_rows("train") if "train" in dataset.splits else 0
    if not rows or rows >= STEPS_OF_AN_EPOCH * default:
        return default
    # The largest power of two that leaves enough steps.
    size = max(SMALLEST_BATCH, 1 << max(0, (rows // STEPS_OF_AN_EPOCH).bit_length() - 1))
    # Rounded up: the last batch of an epoch may be smaller.
    remarks["training.batch_size"] = f"{-(-rows // size):,} steps for {rows:,} training samples."
    return size


def _eval_split(dataset: DatasetSpec, remarks: dict[str, str]) -> str | None:
    others = [split for split in dataset.splits if split != "train"]
    if "valid" in others:
        return "valid"
    remarks["training.eval_split"] = "The data have no split 'valid'."
    return others[0] if others else None


def _words(name: str) -> set[str]:
    """Split ``user_id`` and ``userId`` into user, id."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def _names(dataset: DatasetSpec) -> list[str]:
    return [*(column.name for column in dataset.dense), *(column.name for column in dataset.categorical)]
