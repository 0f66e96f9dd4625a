"""A model's graph as JSON, which `Model.graph_to_json` writes and `Model.construct_from_json` reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from terarec.hugectr.embedding_collection import EmbeddingCollectionConfig
from terarec.hugectr.enums import (
    LAYER_SYNONYMS,
    Activation_t,
    CommunicationStrategy,
    CompressionStrategy,
    Embedding_t,
    Layer_t,
    Regularizer_t,
)
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.json_files import JsonObject, optimizer_to_json, read_optimizer
from terarec.hugectr.layer_kinds import LOSSES
from terarec.hugectr.objects import (
    DataReaderSparseParam,
    DenseLayer,
    EmbeddingTableConfig,
    EmbeddingTablePlaceHolder,
    Input,
    OptParamsPy,
    SparseEmbedding,
)
from terarec.hugectr.schema.table import forms
from terarec.hugectr.schema.types import (
    BOOL,
    STRING,
    Type,
    dict_of,
    integer,
    list_of,
    member_name,
    number,
    one_of,
    scalar_or_list,
)
from terarec.spec.quoting import quoted


@dataclass(frozen=True, slots=True)
class Clause:
    """A value of a layer's JSON.

    Attributes:
        parameter: of `DenseLayer`.
        path: where it stands: a key, or the name of an object and the key in it.
        is_optional: written only when it is not the default.
        also: older keys at the same place, which are read as well.
    """

    parameter: str
    path: tuple[str, ...]
    is_optional: bool = False
    also: tuple[str, ...] = ()


def _inside(clause: str, *parameters: str, **renamed: str) -> tuple[Clause, ...]:
    """Values in the object `clause`, under the parameter's own name or, for `renamed`, key=parameter."""
    pairs = [(name, name) for name in parameters] + [(parameter, key) for key, parameter in renamed.items()]
    return tuple(Clause(parameter, (clause, key)) for parameter, key in pairs)


def _outside(*parameters: str, **renamed: str) -> tuple[Clause, ...]:
    pairs = [(name, name) for name in parameters] + [(parameter, key) for key, parameter in renamed.items()]
    return tuple(Clause(parameter, (key,)) for parameter, key in pairs)


def _optional(*clauses: Clause) -> tuple[Clause, ...]:
    return tuple(Clause(clause.parameter, clause.path, is_optional=True) for clause in clauses)


_INITIALIZED = {"weight_init": "weight_init_type", "bias_init": "bias_init_type"}
_SCALED = {"gamma_init": "gamma_init_type", "beta_init": "beta_init_type"}
_FC = (*_inside("fc_param", "num_output"), *_optional(*_inside("fc_param", **_INITIALIZED)))
_NORM = Clause("lambda", ("lambda",), is_optional=True)

CLAUSES: dict[Layer_t, tuple[Clause, ...]] = {
    Layer_t.BatchNorm: (*_inside("bn_param", "factor", "eps"), *_optional(*_inside("bn_param", **_SCALED))),
    Layer_t.LayerNorm: (*_inside("ln_param", "eps"), *_optional(*_inside("ln_param", **_SCALED))),
    Layer_t.BinaryCrossEntropyLoss: (_NORM,),
    Layer_t.CrossEntropyLoss: (_NORM,),
    Layer_t.MultiCrossEntropyLoss: (*_outside(target_weight="target_weight_vec"), _NORM),
    Layer_t.Reshape: _optional(*_outside("leading_dim", "time_step", "shape", selected="selected_slots")),
    Layer_t.Select: _outside("dim", "index"),
    Layer_t.Concat: _outside("axis"),
    Layer_t.Dropout: _outside(rate="dropout_rate"),
    Layer_t.ElementwiseMultiply: (),
    Layer_t.ELU: _inside("elu_param", alpha="elu_alpha"),
    Layer_t.InnerProduct: _FC,
    Layer_t.FusedInnerProduct: (*_FC, *_outside(position="pos_type", activation="act_type")),
    Layer_t.MLP: (
        *_inside("mlp_param", "num_output", "num_outputs", "use_bias", activation="act_type"),
        *_optional(*_inside("mlp_param", "biases", "activations", **_INITIALIZED)),
    ),
    Layer_t.Interaction: (),
    Layer_t.ReLU: (),
    Layer_t.ReLUHalf: (),
    Layer_t.Sigmoid: (),
    Layer_t.Slice: _outside("ranges"),
    Layer_t.WeightMultiply: (*_outside("weight_dims"), *_optional(*_outside(weight_init="weight_init_type"))),
    Layer_t.FmOrder2: _outside("out_dim"),
    Layer_t.Add: (),
    Layer_t.ReduceSum: _outside("axis"),
    Layer_t.ReduceMean: _outside("axis"),
    Layer_t.Softmax: _outside("factor"),
    Layer_t.Gather: _outside("indices"),
    Layer_t.PReLU_Dice: (
        # HugeCTR writes `alpha` and reads `elu_alpha`; both are written, so that either reader finds it.
        *_inside("prelu_dice_param", alpha="elu_alpha", elu_alpha="elu_alpha"),
        Clause("eps", ("prelu_dice_param", "eps"), also=("epsilon",)),
    ),
    Layer_t.GRU: (
        *_inside("gru_param", "num_output", "batchsize", "SeqLength", "vector_size"),
        *_optional(*_inside("gru_param", **_INITIALIZED)),
    ),
    Layer_t.MatrixMultiply: _optional(*_outside("transpose_b")),
    Layer_t.MultiHeadAttention: (*_outside("num_attention_heads"), *_optional(*_outside("transpose_b"))),
    Layer_t.Scale: (
        *_inside("scale_param", "axis", "factor"),
        *_optional(*_inside("scale_param", "first_copy_gradient")),
    ),
    Layer_t.FusedReshapeConcat: (),
    Layer_t.FusedReshapeConcatGeneral: (),
    Layer_t.Sub: (),
    Layer_t.MultiCross: (
        *_inside("mc_param", "num_layers"),
        *_optional(*_inside("mc_param", "projection_dim"), *_inside("mc_param", **_INITIALIZED)),
    ),
    Layer_t.Cast: (),
    Layer_t.SequenceMask: tuple(
        Clause(name, (name,), also=("max_sequence_len",)) for name in ("max_sequence_len_from", "max_sequence_len_to")
    ),
}
"""For every kind of layer the values of its JSON, in their order."""

IS_COPY = "is_copy"
"""Marks such a Slice, so that terarec leaves it out again; HugeCTR's readers pass over keys that they do not know."""


def with_copies(layers: Sequence[dict[str, Any]], widths: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """`layers` with a Slice before the first reader of each tensor that is read several times.

    Its outputs are the integer tensor each, named ``<tensor>_slice<n>``, one for every time it is read.

    Args:
        layers: of a graph's JSON, dense ones.
        widths: last dimension of each tensor.
    """
    uses = Counter(name for layer in layers for name in _bottoms(layer))
    served: Counter[str] = Counter()
    for layer in layers:
        bottoms = []
        for name in _bottoms(layer):
            if uses[name] > 1 and not served[name]:
                yield _copies(name, uses[name], widths[name])
            bottoms.append(f"{name}_slice{served[name]}" if uses[name] > 1 else name)
            served[name] += 1
        yield {**layer, "bottom": bottoms[0] if len(bottoms) == 1 else bottoms}


def _copies(name: str, count: int, width: int) -> dict[str, Any]:
    tops = [f"{name}_slice{number}" for number in range(count)]
    return {"type": "Slice", "bottom": name, "top": tops, "ranges": [[0, width]] * count, IS_COPY: True}


def _bottoms(layer: Mapping[str, Any]) -> list[str]:
    bottom = layer["bottom"]
    return [bottom] if isinstance(bottom, str) else list(bottom)


_UNREAD = ("name",)


def layer_to_json(layer: DenseLayer) -> dict[str, Any]:
    """`layer` as what `json.dumps` takes, with the keys that HugeCTR gives its kind."""
    written: dict[str, Any] = {"type": layer.layer_type.name, **_ends(layer.bottom_names, layer.top_names)}
    values = layer.values()
    for clause in CLAUSES[layer.layer_type]:
        value = values[clause.parameter]
        if not clause.is_optional or value != DenseLayer.parameter(clause.parameter).default:
            inside = written
            for name in clause.path[:-1]:
                inside = inside.setdefault(name, {})
            inside[clause.path[-1]] = _json_value(value)
    if layer.layer_type in LOSSES and layer.use_regularizer:
        written |= {"regularizer": layer.regularizer_type.name, "lambda": values["lambda"]}
    return written


def _json_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return "None" if value.name == "Non" else value.name
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [_json_value(item) for item in value] if isinstance(value, list | tuple) else value


def _ends(bottoms: list[str], tops: list[str]) -> Mapping[str, Any]:
    """Names of tensors: one as a string, several as a list."""
    return {key: names[0] if len(names) == 1 else names for key, names in (("bottom", bottoms), ("top", tops)) if names}


def read_layer(data: JsonObject, kind: str) -> DenseLayer:
    """The layer of the kind named `kind` in `data`.

    Raises:
        WrongInputError: no such kind, an unknown key, or a value that is not accepted.
    """
    layer_type = {**Layer_t.__members__, **LAYER_SYNONYMS}.get(kind)
    if layer_type is None:
        raise WrongInputError(
            f"{data.where}.type: got {quoted(kind)}, expected one of {', '.join(Layer_t.__members__)}"
        )
    given: dict[str, Any] = {"layer_type": layer_type, "bottom_names": [], "top_names": []}
    for key in ("bottom", "top"):
        given[f"{key}_names"] = data.take(key, scalar_or_list(STRING))
    inside = {clause.path[0]: data.child(clause.path[0]) for clause in CLAUSES[layer_type] if len(clause.path) == 2}
    for clause in CLAUSES[layer_type]:
        holder = inside[clause.path[0]] if len(clause.path) == 2 else data
        for key in (clause.path[-1], *clause.also):
            if holder.has(key):
                given[clause.parameter] = holder.take(key, _json_kind(clause.parameter))
    if layer_type in LOSSES and data.has("regularizer"):
        given |= {"use_regularizer": True, "regularizer_type": data.take("regularizer", member_name(Regularizer_t))}
    if given.get("selected_slots"):
        given["selected"] = True
    for holder in (*inside.values(), data):
        holder.finish(_UNREAD)
    return _located(data, given)


def _located(data: JsonObject, given: Mapping[str, Any]) -> DenseLayer:
    try:
        return DenseLayer(**given)
    except WrongInputError as error:
        raise WrongInputError(f"{data.where}: {error}") from None


def _json_kind(parameter: str) -> Type[Any]:
    """What a JSON file holds for a parameter of `DenseLayer`: members of enumerations are names there."""
    found = DenseLayer.parameter(parameter)
    default, kind = found.default, found.type
    if isinstance(default, Enum):
        return member_name(type(default))
    return list_of(member_name(Activation_t)) if parameter == "activations" else kind


EMBEDDING_TYPES = dict(Embedding_t.__members__)
"""Embeddings by their type in JSON."""

_COMBINERS = {0: "sum", 1: "mean", "sum": "sum", "mean": "mean"}
_ROOM = ("workspace_size_per_gpu_in_mb", "max_vocabulary_size_per_gpu")
# Which GPU talks to which: without effect on results.
_IGNORED = ("name", "plan_file", "plan_file1")


def embedding_to_json(embedding: SparseEmbedding, optimizer: OptParamsPy, capacity: int) -> dict[str, Any]:
    """`embedding` as what `json.dumps` takes.

    Args:
        embedding: what to write.
        optimizer: the model's.
        capacity: most keys over all devices.
    """
    room = {key: getattr(embedding, key) for key in _ROOM}
    if not room["max_vocabulary_size_per_gpu"]:
        del room["max_vocabulary_size_per_gpu"]
    hyperparameters: dict[str, Any] = {
        **room,
        "max_vocabulary_size_global": capacity,
        "embedding_vec_size": embedding.embedding_vec_size,
        "combiner": embedding.combiner,
    }
    if embedding.slot_size_array:
        hyperparameters["slot_size_array"] = embedding.slot_size_array
    return {
        "type": embedding.embedding_type.name,
        "bottom": embedding.bottom_name,
        "top": embedding.sparse_embedding_name,
        "sparse_embedding_hparam": hyperparameters,
        "optimizer": optimizer_to_json(embedding.optimizer or optimizer),
    }


def read_embedding(data: JsonObject, kind: Embedding_t) -> SparseEmbedding:
    """The embedding of `kind` in `data`.

    Raises:
        WrongInputError: an unknown key, or a value that is not accepted.
    """
    values = data.child("sparse_embedding_hparam")
    room = {key: values.take(key, integer(0)) for key in _ROOM if values.has(key)}
    if room.get("max_vocabulary_size_per_gpu"):
        room.pop("workspace_size_per_gpu_in_mb", None)
    given: dict[str, Any] = {
        **room,
        "embedding_type": kind,
        "embedding_vec_size": values.take("embedding_vec_size", integer(1)),
        "combiner": _COMBINERS[values.take("combiner", one_of(*_COMBINERS))],
        "slot_size_array": values.take("slot_size_array", list_of(integer(0)), []),
        "bottom_name": data.take("bottom", scalar_or_list(STRING))[0],
        "sparse_embedding_name": data.take("top", scalar_or_list(STRING))[0],
    }
    if data.has("optimizer"):
        given["optimizer"] = read_optimizer(data.child("optimizer"))
    values.finish(("max_vocabulary_size_global", "plan_file"))
    data.finish(_IGNORED)
    try:
        return SparseEmbedding(**given)
    except WrongInputError as error:
        raise WrongInputError(f"{data.where}: {error}") from None


def collection_to_json(config: EmbeddingCollectionConfig) -> dict[str, Any]:
    """`config` as what `json.dumps` takes: a layout of terarec's own, as HugeCTR's files have none for it."""
    tables = {lookup.table.name: lookup.table for lookup in config.lookups}
    plan = config.plan
    written: dict[str, Any] = {
        "use_exclusive_keys": config.use_exclusive_keys,
        "comm_strategy": config.comm_strategy.name,
        "top": config.concatenated_name,
        "tables": [_table_to_json(table) for table in tables.values()],
        "lookups": [
            {"table": one.table.name, "bottom": one.bottom_name, "top": one.top_name, "combiner": one.combiner}
            for one in config.lookups
        ],
    }
    if plan is not None:
        written["plan"] = {
            "shard_matrix": plan.matrix,
            "shard_strategy": plan.strategy,
            "compression_strategy": {kind.name: names for kind, names in plan.compression.items()},
        }
    return written


def _table_to_json(table: EmbeddingTableConfig) -> dict[str, Any]:
    written = {"name": table.name, "max_vocabulary_size": table.max_vocabulary_size, "ev_size": table.ev_size}
    if isinstance(table, EmbeddingTablePlaceHolder):  # which makes outputs of two dimensions
        written["id_space"] = table.id_space
    return {**written, "optimizer": optimizer_to_json(table.opt_params)} if table.opt_params else written


def read_collection(data: JsonObject) -> EmbeddingCollectionConfig:
    """The embedding collection in `data`.

    Raises:
        WrongInputError: an unknown key, or a value that is not accepted.
    """
    config = EmbeddingCollectionConfig(
        data.take("use_exclusive_keys", BOOL, False),
        data.take("comm_strategy", member_name(CommunicationStrategy), CommunicationStrategy.Uniform),
    )
    top = data.take("top", STRING, "")
    tables = {table.name: table for table in map(_read_table, data.children("tables"))}
    lookups = [_read_lookup(lookup, tables) for lookup in data.children("lookups")]
    if top:
        columns = {name: [lookup[name] for lookup in lookups] for name in ("table_config", "bottom_name", "combiner")}
        config.embedding_lookup(**columns, top_name=top)
    else:
        for lookup in lookups:
            config.embedding_lookup(**lookup)
    if data.has("plan"):
        plan = data.child("plan")
        (shard,) = forms()["EmbeddingCollectionConfig.shard"]
        kinds = {one.name: one.type for one in shard.parameters}
        kinds["compression_strategy"] = dict_of(member_name(CompressionStrategy), list_of(STRING))
        config.shard(**{name: plan.take(name, kind) for name, kind in kinds.items()})
        plan.finish()
    data.finish()
    return config


def _read_table(data: JsonObject) -> EmbeddingTableConfig:
    name = data.take("name", STRING)
    rows, width = data.take("max_vocabulary_size", integer(-1)), data.take("ev_size", integer(1))
    optimizer = read_optimizer(data.child("optimizer")) if data.has("optimizer") else None
    made = EmbeddingTableConfig(name, rows, width, optimizer)
    if data.has("id_space"):
        made = EmbeddingTablePlaceHolder(data.take("id_space", integer(0)), rows, width, opt_params=optimizer)
    data.finish()
    return made


def _read_lookup(data: JsonObject, tables: dict[str, EmbeddingTableConfig]) -> dict[str, Any]:
    table = data.take("table", one_of(*tables))
    found = {
        "table_config": tables[table],
        "bottom_name": data.take("bottom", STRING),
        "top_name": data.take("top", STRING),
        "combiner": data.take("combiner", STRING),
    }
    data.finish()
    return found


Part = Input | SparseEmbedding | EmbeddingCollectionConfig | DenseLayer

DATA, COLLECTION = "Data", "EmbeddingCollection"
# Files of tests and of older releases hold these besides, for other readers than the graph's.
_BESIDE = ("solver", "optimizer", "inference")
_OF_READERS = (
    "name", "format", "source", "eval_source", "check", "cache_eval_data", "num_workers", "num_samples",
    "eval_num_samples", "slot_size_array", "float_label_dense",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """What a graph's file holds.

    Attributes:
        model_name: as the solver named it.
        parts: the `Input`, the embeddings and the layers, in their order.
    """

    model_name: str
    parts: tuple[Part, ...]


def graph_to_json(
    graph: Graph,
    optimizer: OptParamsPy,
    capacity_of: Callable[[SparseEmbedding], int],
    widths: Mapping[str, int],
) -> dict[str, Any]:
    """`graph` as what `json.dumps` takes.

    Args:
        graph: a model.
        optimizer: the model's, which embeddings without one of their own have.
        capacity_of: most keys of an embedding over all devices.
        widths: last dimension of each tensor.
    """
    layers: list[dict[str, Any]] = []
    dense: list[dict[str, Any]] = []
    for part in graph.parts:
        if isinstance(part, Input):
            layers.append(_input_to_json(part))
        elif isinstance(part, SparseEmbedding):
            layers.append(embedding_to_json(part, optimizer, capacity_of(part)))
        elif isinstance(part, EmbeddingCollectionConfig):
            layers.append({"type": COLLECTION, **collection_to_json(part)})
        else:
            dense.append(layer_to_json(part))
    return {"layers": [*layers, *with_copies(dense, widths)], "model_name": graph.model_name}


def read_graph(data: JsonObject) -> Graph:
    """The graph in a file.

    Raises:
        WrongInputError: an unknown kind or key, or a value that is not accepted; the message has its path.
    """
    model_name = data.take("model_name", STRING, "")
    parts = read_parts(data.children("layers"))
    data.finish(_BESIDE)
    return Graph(model_name=model_name, parts=parts)


def read_parts(layers: Sequence[JsonObject]) -> tuple[Part, ...]:
    """The parts in the list ``layers`` of a graph's or a training file.

    Raises:
        WrongInputError: as `read_graph`.
    """
    if not layers or layers[0].take("type", STRING, "") != DATA:
        where = layers[0].where if layers else "layers"
        raise WrongInputError(f"{where}: expected the first layer to be of type {DATA}")
    parts: list[Part] = [read_input(layers[0])]
    copied: dict[str, str] = {}
    for layer in layers[1:]:
        is_copy = layer.take(IS_COPY, BOOL, False)
        part = _read_part(layer)
        if is_copy and isinstance(part, DenseLayer):
            copied |= dict.fromkeys(part.top_names, part.bottom_names[0])
        elif isinstance(part, DenseLayer) and copied:
            parts.append(part.with_values(bottom_names=[copied.get(name, name) for name in part.bottom_names]))
        else:
            parts.append(part)
    return tuple(parts)


def _read_part(layer: JsonObject) -> Part:
    kind = layer.take("type", STRING)
    if kind in EMBEDDING_TYPES:
        return read_embedding(layer, EMBEDDING_TYPES[kind])
    if kind == COLLECTION:
        return read_collection(layer)
    return read_layer(layer, kind)


def _input_to_json(part: Input) -> dict[str, Any]:
    has_one = "label_name" in part.values()
    names, dims = part.label_names, part.label_dims
    label: dict[str, Any] = {"top": names[0] if has_one else names, "label_dim": dims[0] if has_one else dims}
    if set(part.label_weights) != {1.0}:
        label["label_weights"] = part.label_weights
    return {
        "type": DATA,
        "label": label,
        "dense": {"top": part.dense_name, "dense_dim": part.dense_dim},
        "sparse": [
            {
                "top": slots.top_name,
                "nnz_per_slot": slots.nnz_per_slot,
                "is_fixed_length": slots.is_fixed_length,
                "slot_num": slots.slot_num,
            }
            for slots in part.data_reader_sparse_param_array
        ],
    }


def read_input(data: JsonObject) -> Input:
    """The `Input` in a layer of type Data; keys of a reader are left to `training_json`.

    Raises:
        WrongInputError: as `read_graph`.
    """
    label, dense = data.child("label"), data.child("dense")
    tops, dims = label.take("top", scalar_or_list(STRING)), label.take("label_dim", scalar_or_list(integer(1)))
    weights = label.take("label_weights", list_of(number()), [])
    given: dict[str, Any] = {"label_dims": dims, "label_names": tops}
    if weights:
        given["label_weights"] = weights
    if len(tops) == 1 and not weights:
        given = {"label_dim": dims[0], "label_name": tops[0]}
    made = Input(
        **given,
        dense_name=dense.take("top", STRING),
        dense_dim=dense.take("dense_dim", integer(0)),
        data_reader_sparse_param_array=[_read_slots(slots) for slots in data.children("sparse")],
    )
    for clause in (label, dense):
        clause.finish()
    data.finish(_OF_READERS)
    return made


def _read_slots(data: JsonObject) -> DataReaderSparseParam:
    name, slots = data.take("top", STRING), data.take("slot_num", integer(1))
    if data.has("max_feature_num_per_sample"):
        most = data.take("max_feature_num_per_sample", integer(1))
        hotness, is_fixed = [data.take("max_nnz", integer(1), most)], False
    else:
        hotness, is_fixed = (
            data.take("nnz_per_slot", scalar_or_list(integer(1))),
            data.take("is_fixed_length", BOOL, False),
        )
    data.finish(("type",))
    return DataReaderSparseParam(name, hotness, is_fixed, slots)
