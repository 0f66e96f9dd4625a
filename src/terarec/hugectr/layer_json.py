"""`DenseLayer` as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from terarec.hugectr.enums import LAYER_SYNONYMS, Activation_t, Layer_t, Regularizer_t
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.json_object import JsonObject
from terarec.hugectr.tables.dense_layer import DENSE_LAYER, DenseLayer
from terarec.hugectr.tables.kinds import TEXT, Kind, listed, named_member, one_or_list
from terarec.hugectr.tables.layer_json import CLAUSES, LOSSES
from terarec.spec.quoting import quoted

_ROWS = {row.name: row for row in DENSE_LAYER.rows}
_IGNORED = ("name",)


def layer_to_json(layer: DenseLayer) -> dict[str, Any]:
    """`layer` as what `json.dumps` takes, with the keys that HugeCTR gives its kind."""
    written: dict[str, Any] = {"type": layer.layer_type.name, **_ends(layer.bottom_names, layer.top_names)}
    values = layer.values()
    for clause in CLAUSES[layer.layer_type]:
        value = values[clause.parameter]
        if not clause.is_optional or value != _ROWS[clause.parameter].default:
            inside = written
            for name in clause.path[:-1]:
                inside = inside.setdefault(name, {})
            inside[clause.path[-1]] = _plain(value)
    if layer.layer_type in LOSSES and layer.use_regularizer:
        written |= {"regularizer": layer.regularizer_type.name, "lambda": values["lambda"]}
    return written


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return "None" if value.name == "Non" else value.name
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


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
        given[f"{key}_names"] = data.take(key, one_or_list(TEXT))
    inside = {clause.path[0]: data.child(clause.path[0]) for clause in CLAUSES[layer_type] if len(clause.path) == 2}
    for clause in CLAUSES[layer_type]:
        holder = inside[clause.path[0]] if len(clause.path) == 2 else data
        for key in (clause.path[-1], *clause.also):
            if holder.has(key):
                given[clause.parameter] = holder.take(key, _json_kind(clause.parameter))
    if layer_type in LOSSES and data.has("regularizer"):
        given |= {"use_regularizer": True, "regularizer_type": data.take("regularizer", named_member(Regularizer_t))}
    if given.get("selected_slots"):
        given["selected"] = True
    for holder in (*inside.values(), data):
        holder.finish(_IGNORED)
    return _located(data, given)


def _located(data: JsonObject, given: Mapping[str, Any]) -> DenseLayer:
    try:
        return DenseLayer(**given)
    except WrongInputError as error:
        raise WrongInputError(f"{data.where}: {error}") from None


def _json_kind(parameter: str) -> Kind:
    """What a JSON file holds for a parameter of `DenseLayer`: members of enumerations are names there."""
    default, kind = _ROWS[parameter].default, _ROWS[parameter].kind
    if isinstance(default, Enum):
        return named_member(type(default))
    return listed(named_member(Activation_t)) if parameter == "activations" else kind
