"""DenseLayer, GroupDenseLayer, DenseLayerComputeConfig and DenseLayerSwitchs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terarec.hugectr.enums import Activation_t, FcPosition_t, GroupLayer_t, Initializer_t, Layer_t, Regularizer_t
from terarec.hugectr.tables.kinds import TEXT, TRUTH, Kind, instance, listed, member, number, one_or_list, pair, whole
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.table import Parameter, Status, Table

_GPU_ORDER = "it only orders and joins a GPU's work"

_FUSE = Parameter(
    name="fuse_wb",
    kind=TRUTH,
    default=False,
    since="3.7",
    status=Status.IGNORED,
    why=_GPU_ORDER,
    meaning="weights' and biases' gradients in one kernel",
)
DENSE_LAYER_COMPUTE_CONFIG = Table(
    name="DenseLayerComputeConfig",
    meaning="how a GPU works on a layer",
    rows=(
        Parameter(
            name="async_wgrad",
            kind=TRUTH,
            default=False,
            since="23.04",
            status=Status.IGNORED,
            why=_GPU_ORDER,
            meaning="weight gradients on a stream of their own",
        ),
        replace(_FUSE, since="23.04"),
    ),
)
DENSE_LAYER_SWITCHS = Table(
    name="DenseLayerSwitchs", meaning="how a GPU works on a layer (3.7 to 4.3)", rows=(replace(_FUSE, until="4.3"),)
)


class DenseLayerComputeConfig(Record, forms=(DENSE_LAYER_COMPUTE_CONFIG,)):
    """How a GPU works on a layer."""


class DenseLayerSwitchs(Record, forms=(DENSE_LAYER_SWITCHS,)):
    """How a GPU works on a layer, as 3.7 to 4.3 spell it."""


def _option(name: str, kind: Kind, default: Any, meaning: str, since: str = "2.3", until: str = "25.03") -> Parameter:
    return Parameter(name=name, kind=kind, default=default, meaning=meaning, since=since, until=until)


_INITIALIZER = member(Initializer_t)
_ACTIVATION = member(Activation_t)
_WHOLES = listed(whole())

ROWS = (
    Parameter(name="layer_type", kind=member(Layer_t), meaning="its kind"),
    Parameter(name="bottom_names", kind=one_or_list(TEXT), meaning="tensors that it reads"),
    Parameter(name="top_names", kind=one_or_list(TEXT), meaning="tensors that it makes"),
    _option("factor", number(), 1.0, "BatchNorm: share of the batch in the running figures; Scale: copies; Softmax"),
    _option("eps", number(0.0), 1e-5, "BatchNorm, LayerNorm, PReLU_Dice"),
    _option("gamma_init_type", _INITIALIZER, Initializer_t.Default, "BatchNorm, LayerNorm"),
    _option("beta_init_type", _INITIALIZER, Initializer_t.Default, "BatchNorm, LayerNorm"),
    _option("dropout_rate", number(0.0, 1.0), 0.5, "Dropout"),
    _option("elu_alpha", number(), 1.0, "ELU, PReLU_Dice"),
    _option("num_output", whole(1), 1, "InnerProduct, FusedInnerProduct, GRU, MLP of one layer"),
    _option("weight_init_type", _INITIALIZER, Initializer_t.Default, "layers with weights"),
    _option("bias_init_type", _INITIALIZER, Initializer_t.Default, "layers with biases"),
    _option("num_layers", whole(0), 0, "MultiCross"),
    _option("leading_dim", whole(0), 0, "Reshape: width of the rows made"),
    _option("time_step", whole(0), 0, "Reshape: rows of a sequence", since="3.1"),
    _option("batchsize", whole(1), 1, "GRU", since="3.1"),
    _option("SeqLength", whole(1), 1, "GRU", since="3.1"),
    _option("vector_size", whole(1), 1, "GRU", since="3.1"),
    _option("selected", TRUTH, False, "Reshape: take selected_slots"),
    _option("selected_slots", _WHOLES, [], "Reshape: slots taken"),
    _option("ranges", listed(pair(whole(0), whole(0))), [], "Slice: first column and the one behind the last"),
    _option("indices", _WHOLES, [], "Gather: rows taken", since="3.1"),
    _option("weight_dims", _WHOLES, [], "WeightMultiply: [slots, width]"),
    _option("projection_dim", whole(0), 0, "MultiCross: width between the two products; 0: version 1", since="23.02"),
    _option("out_dim", whole(0), 0, "FmOrder2"),
    _option("axis", whole(), 1, "Concat, ReduceSum, ReduceMean, Scale"),
    _option("max_sequence_len_from", whole(1), 1, "SequenceMask", since="23.08"),
    _option("max_sequence_len_to", whole(1), 1, "SequenceMask", since="23.08"),
    _option("num_attention_heads", whole(1), 1, "MultiHeadAttention", since="4.3"),
    _option("transpose_b", TRUTH, False, "MatrixMultiply, MultiHeadAttention", since="4.3"),
    _option("target_weight_vec", listed(number()), [], "MultiCrossEntropyLoss: weight of every label"),
    _option("use_regularizer", TRUTH, False, "losses: add a norm of all dense weights"),
    _option("regularizer_type", member(Regularizer_t), Regularizer_t.L1, "losses"),
    _option("lambda", number(0.0), 0.0, "losses: factor of the norm"),
    _option("pos_type", member(FcPosition_t), FcPosition_t.Non, "FusedInnerProduct: its place", since="3.1"),
    _option("act_type", _ACTIVATION, Activation_t.Relu, "FusedInnerProduct, MLP: activation", since="3.1"),
    _option("num_outputs", listed(whole(1)), [], "MLP: width of every layer", since="4.2"),
    _option("use_bias", TRUTH, True, "MLP: every layer has a bias", since="4.2"),
    _option("activations", listed(_ACTIVATION), [], "MLP: activation of every layer", since="4.2"),
    _option("biases", listed(TRUTH), [], "MLP: whether every layer has a bias", since="4.2"),
    Parameter(
        name="compute_config",
        kind=instance(DenseLayerComputeConfig),
        default=DenseLayerComputeConfig(),
        since="23.04",
        status=Status.IGNORED,
        why=_GPU_ORDER,
        meaning="how a GPU works on the layer",
    ),
    _option("shape", _WHOLES, [], "Reshape: the shape, with one -1", since="23.08"),
    _option("dim", whole(), 0, "Select: dimension", since="23.12"),
    _option("index", _WHOLES, [], "Select: places taken along it", since="23.12"),
    Parameter(
        name="max_sequence_len",
        kind=whole(0),
        default=0,
        since="3.9",
        until="23.06",
        is_positional=False,
        meaning="SequenceMask: both max_sequence_len_from and max_sequence_len_to",
    ),
    Parameter(
        name="dense_layer_switches",
        kind=instance(DenseLayerSwitchs),
        default=DenseLayerSwitchs(),
        since="3.7",
        until="4.3",
        status=Status.IGNORED,
        why=_GPU_ORDER,
        is_positional=False,
        meaning="how a GPU works on the layer",
    ),
    Parameter(
        name="first_copy_gradient",
        kind=TRUTH,
        default=False,
        is_positional=False,
        meaning="terarec's own: True: Scale has the gradient of its first copy alone, as in every release of HugeCTR; "
        "False: the sum over its copies",
    ),
)


def _both_lengths(values: Mapping[str, Any]) -> Mapping[str, Any]:
    length = values["max_sequence_len"]
    return {"max_sequence_len_from": length, "max_sequence_len_to": length} if length else {}


DENSE_LAYER = Table(name="DenseLayer", meaning="a layer of the dense network", rows=ROWS, derive=_both_lengths)


class DenseLayer(Record, forms=(DENSE_LAYER,)):
    """A layer of the dense network; ``bottom_names`` and ``top_names`` are always lists."""


_GROUP = (
    Parameter(
        name="group_layer_type",
        kind=member(GroupLayer_t),
        default=GroupLayer_t.GroupFusedInnerProduct,
        since="3.3",
        until="23.12",
        meaning="its kind",
    ),
    Parameter(name="bottom_name_list", kind=one_or_list(TEXT), since="3.4", until="23.12", meaning="tensors read"),
    Parameter(name="top_name_list", kind=listed(TEXT), since="3.3", until="23.12", meaning="output of every layer"),
    Parameter(name="num_outputs", kind=listed(whole(1)), since="3.3", until="23.12", meaning="width of every layer"),
    Parameter(
        name="last_act_type",
        kind=_ACTIVATION,
        default=Activation_t.Relu,
        since="3.3",
        until="23.12",
        meaning="activation of the last layer; the others have ReLU",
    ),
)


def _two_layers_with_names(values: Mapping[str, Any]) -> str | None:
    tops, widths = values["top_name_list"], values["num_outputs"]
    if len(widths) < 2 or len(tops) != len(widths):
        return f"num_outputs: got {widths} for the tops {tops}, expected two layers or more, one for each top"
    return None


GROUP_DENSE_LAYER = Table(
    name="GroupDenseLayer",
    meaning="a chain of fully connected layers",
    rows=_GROUP,
    rules=(_two_layers_with_names,),
)
GROUP_DENSE_LAYER_3_3 = replace(
    GROUP_DENSE_LAYER,
    meaning="a chain of fully connected layers (3.3)",
    rows=tuple(
        replace(row, name="bottom_name", since="3.3", until="3.3") if row.name == "bottom_name_list" else row
        for row in _GROUP
    ),
    fits=lambda args, kwargs: "bottom_name" in kwargs,
    derive=lambda values: {"bottom_name_list": values["bottom_name"]},
)


class GroupDenseLayer(Record, forms=(GROUP_DENSE_LAYER, GROUP_DENSE_LAYER_3_3)):
    """A chain of fully connected layers."""
