# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's dense layers: as terarec's layers, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from terarec.hugectr.enums import LAYER_SYNONYMS, Activation_t, FcPosition_t, Initializer_t, Layer_t, Regularizer_t
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.json_files import JsonObject
from terarec.hugectr.objects import DenseLayer, GroupDenseLayer
from terarec.hugectr.release import NEWEST, release_number
from terarec.hugectr.schema.table import load_toml
from terarec.hugectr.schema.types import STRING, Type, list_of, member_name, scalar_or_list
from terarec.nn.registry import LAYERS
from terarec.spec import GraphLayer
from terarec.spec.checks import quoted


@dataclass(frozen=True, slots=True)
class JsonKey:
    """A key of a layer's JSON.

    Attributes:
        parameter: Its parameter of `DenseLayer`.
        path: The key, or an object's key and the key in it.
        is_optional: Whether it is left out where the value is the default.
        others: Keys of other files at the same place.
    """

    parameter: str
    path: tuple[str, ...]
    is_optional: bool
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """A kind of layer.

    Attributes:
        layer: Its name in `terarec.nn.registry`.
        keys: The keys of its JSON, in their order.
    """

    layer: str
    keys: tuple[JsonKey, ...]


@cache
def layer_formats() -> Mapping[Layer_t, LayerFormat]:
    """Return the format of every kind of layer, from ``schema/layer_json.toml``."""
    files = load_toml("layer_json")
    return {Layer_t[kind]: LayerFormat(section["layer"], _json_keys(section)) for kind, section in files.items()}


def _json_keys(section: Mapping[str, Mapping[str, Any]]) -> tuple[JsonKey, ...]:
    others = section.get("other_spellings", {})
    return tuple(
        JsonKey(parameter, tuple(key.split(".")), clause == "optional_keys", tuple(others.get(key, ())))
        for clause in ("keys", "optional_keys")
        for key, parameter in section.get(clause, {}).items()
    )


LOSSES = (Layer_t.BinaryCrossEntropyLoss, Layer_t.CrossEntropyLoss, Layer_t.MultiCrossEntropyLoss)

SOURCES = {
    "weight_init": "weight_init_type",
    "bias_init": "bias_init_type",
    "gamma_init": "gamma_init_type",
    "beta_init": "beta_init_type",
    "activation": "act_type",
    "alpha": "elu_alpha",
    "rate": "dropout_rate",
    "target_weights": "target_weight_vec",
    "regularizer": "regularizer_type",
    "strength": "lambda",
    "sequence_length": "SeqLength",
}
"""The options whose parameter of `DenseLayer` has another name."""

_MEMBERS = {
    Initializer_t.Default: "default",
    Initializer_t.Uniform: "uniform",
    Initializer_t.XavierNorm: "xavier_norm",
    Initializer_t.XavierUniform: "xavier_uniform",
    Initializer_t.Zero: "zero",
    Activation_t.Relu: "relu",
    Activation_t.Non: "none",
    Regularizer_t.L1: "l1",
    Regularizer_t.L2: "l2",
}

# A second tensor of these carries gradients between kernels of a GPU; it is neither made nor read here.
_HAS_SCRATCH = {Layer_t.FusedInnerProduct, Layer_t.MLP, Layer_t.Interaction}


def graph_layer(layer: DenseLayer, release: tuple[int, int] = release_number(NEWEST)) -> GraphLayer:
    """Return a `DenseLayer` as a layer of a graph, as the release of this number computes it."""
    kind = _kind_of(layer, release)
    bottoms, tops = list(layer.bottom_names), list(layer.top_names)
    if layer.layer_type in _HAS_SCRATCH:
        tops = tops[:1]
        # Interaction reads the dense vector and the embeddings; the scratch of the others is their second bottom.
        bottoms = bottoms if layer.layer_type is Layer_t.Interaction else bottoms[:1]
    values = layer.values()
    options = {
        option.name: _native(values[SOURCES.get(option.name, option.name)])
        for option in LAYERS[kind].options
        if SOURCES.get(option.name, option.name) in values
    }
    if kind == "attention_scores" and release < (4, 3):
        options["scaled"] = False
    if layer.layer_type is Layer_t.MLP:
        options |= _mlp_options(layer)
    if layer.layer_type is Layer_t.Scale:
        options["factor"] = _whole_factor(layer)
    # The call has defaults for both, which mean nothing without the flag.
    if layer.layer_type in LOSSES and not layer.use_regularizer:
        options |= {"regularizer": "none", "strength": 0.0}
    return GraphLayer(kind=kind, bottoms=tuple(bottoms), tops=tuple(tops), options=options)


def _kind_of(layer: DenseLayer, release: tuple[int, int]) -> str:
    """Return the name of `layer`; the numbers of tensors distinguish the two halves of attention in 4.3."""
    numbers = len(layer.bottom_names), len(layer.top_names)
    if layer.layer_type is Layer_t.MultiHeadAttention and numbers in {(3, 2), (2, 1)}:
        # Scores are the product with transposed keys; the product with values, from 4.3 on, transposes nothing.
        is_of_values = numbers == (2, 1) and not layer.transpose_b and release >= (4, 3)
        return "attention_values" if is_of_values else "attention_scores"
    return layer_formats()[layer.layer_type].layer


def _mlp_options(layer: DenseLayer) -> dict[str, Any]:
    """Return the widths, activations and biases for each layer, of which the script may have given one for all."""
    widths = layer.num_outputs or [layer.num_output]
    return {
        "num_outputs": tuple(widths),
        "activations": _native(layer.activations or [layer.act_type] * len(widths)),
        "biases": tuple(layer.biases or [layer.use_bias] * len(widths)),
    }


def _whole_factor(layer: DenseLayer) -> int:
    if not float(layer.factor).is_integer():
        raise WrongInputError(f"Scale {layer.top_names}: factor", f"got {layer.factor}, expected an integer")
    return int(layer.factor)


def fused_layers(group: GroupDenseLayer) -> list[DenseLayer]:
    """Return the layers of a `GroupDenseLayer`: all have ReLU, the last one its ``last_act_type``.

    Between them go tensors that carry gradients between kernels of a GPU, under HugeCTR's names.
    """
    tops = list(group.top_name_list)
    inside = [[top, *(f"{top}_{suffix}" for suffix in ("mask", "dRelu", "db"))] for top in tops[:-1]]
    ends = [list(group.bottom_name_list), *inside, tops[-1:]]
    last = len(tops) - 1
    return [
        DenseLayer(
            Layer_t.FusedInnerProduct,
            ends[number],
            ends[number + 1],
            num_output=width,
            pos_type=FcPosition_t.Head if not number else FcPosition_t.Tail if number == last else FcPosition_t.Body,
            act_type=group.last_act_type if number == last else Activation_t.Relu,
        )
        for number, width in enumerate(group.num_outputs)
    ]


def _native(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_native(item) for item in value)
    return _MEMBERS.get(value, value) if isinstance(value, (Initializer_t, Activation_t, Regularizer_t)) else value


_UNREAD = ("name",)


def layer_to_json(layer: DenseLayer) -> dict[str, Any]:
    """Return `layer` for `json.dumps`, with the keys that HugeCTR has for its type."""
    written: dict[str, Any] = {"type": layer.layer_type.name, **_ends(layer.bottom_names, layer.top_names)}
    values = layer.values()
    for key in layer_formats()[layer.layer_type].keys:
        value = values[key.parameter]
        # Of a Reshape, no list at all: all slots are an empty one.
        is_selected = key.parameter == "selected_slots" and layer.selected
        if is_selected or not key.is_optional or value != DenseLayer.parameter(key.parameter).default:
            inside = written
            for name in key.path[:-1]:
                inside = inside.setdefault(name, {})
            inside[key.path[-1]] = _json_value(value)
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
    """Return the names of tensors: one as a string, several as a list."""
    return {key: names[0] if len(names) == 1 else names for key, names in (("bottom", bottoms), ("top", tops)) if names}


def read_layer(data: JsonObject, kind: str) -> DenseLayer:
    """Return the layer of the kind named `kind` in `data`."""
    layer_type = {**Layer_t.__members__, **LAYER_SYNONYMS}.get(kind)
    if layer_type is None:
        raise WrongInputError(
            f"{data.where}.type", f"got {quoted(kind)}, expected one of {', '.join(Layer_t.__members__)}"
        )
    values: dict[str, Any] = {"layer_type": layer_type, "bottom_names": [], "top_names": []}
    for end in ("bottom", "top"):
        values[f"{end}_names"] = data.take(end, scalar_or_list(STRING))
    keys = layer_formats()[layer_type].keys
    inside = {key.path[0]: data.child(key.path[0]) for key in keys if len(key.path) == 2}
    for key in keys:
        holder = inside[key.path[0]] if len(key.path) == 2 else data
        for name in (key.path[-1], *key.others):
            if holder.has(name):
                values[key.parameter] = holder.take(name, _json_type(key.parameter))
    if layer_type in LOSSES and data.has("regularizer"):
        values |= {"use_regularizer": True, "regularizer_type": data.take("regularizer", member_name(Regularizer_t))}
    # A file has the slots alone; the call needs the flag that says to take them.
    if "selected_slots" in values:
        values["selected"] = True
    for holder in (*inside.values(), data):
        holder.finish(_UNREAD)
    return data.make(DenseLayer, values)


def _json_type(parameter: str) -> Type[Any]:
    """Return the type of a `DenseLayer` parameter in JSON files, where members of enumerations are names."""
    described = DenseLayer.parameter(parameter)
    default, kind = described.default, described.type
    if isinstance(default, Enum):
        return member_name(type(default))
    return list_of(member_name(Activation_t)) if parameter == "activations" else kind
