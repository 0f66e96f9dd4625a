"""How each kind of layer is written in a model's JSON: which parameter stands at which key."""

from __future__ import annotations

from dataclasses import dataclass

from terarec.hugectr.enums import Layer_t


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


def _plain(*parameters: str, **renamed: str) -> tuple[Clause, ...]:
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
    Layer_t.MultiCrossEntropyLoss: (*_plain(target_weight="target_weight_vec"), _NORM),
    Layer_t.Reshape: _optional(*_plain("leading_dim", "time_step", "shape", selected="selected_slots")),
    Layer_t.Select: _plain("dim", "index"),
    Layer_t.Concat: _plain("axis"),
    Layer_t.Dropout: _plain(rate="dropout_rate"),
    Layer_t.ElementwiseMultiply: (),
    Layer_t.ELU: _inside("elu_param", alpha="elu_alpha"),
    Layer_t.InnerProduct: _FC,
    Layer_t.FusedInnerProduct: (*_FC, *_plain(position="pos_type", activation="act_type")),
    Layer_t.MLP: (
        *_inside("mlp_param", "num_output", "num_outputs", "use_bias", activation="act_type"),
        *_optional(*_inside("mlp_param", "biases", "activations", **_INITIALIZED)),
    ),
    Layer_t.Interaction: (),
    Layer_t.ReLU: (),
    Layer_t.ReLUHalf: (),
    Layer_t.Sigmoid: (),
    Layer_t.Slice: _plain("ranges"),
    Layer_t.WeightMultiply: (*_plain("weight_dims"), *_optional(*_plain(weight_init="weight_init_type"))),
    Layer_t.FmOrder2: _plain("out_dim"),
    Layer_t.Add: (),
    Layer_t.ReduceSum: _plain("axis"),
    Layer_t.ReduceMean: _plain("axis"),
    Layer_t.Softmax: _plain("factor"),
    Layer_t.Gather: _plain("indices"),
    Layer_t.PReLU_Dice: (
        # HugeCTR writes `alpha` and reads `elu_alpha`; both are written, so that either reader finds it.
        *_inside("prelu_dice_param", alpha="elu_alpha", elu_alpha="elu_alpha"),
        Clause("eps", ("prelu_dice_param", "eps"), also=("epsilon",)),
    ),
    Layer_t.GRU: (
        *_inside("gru_param", "num_output", "batchsize", "SeqLength", "vector_size"),
        *_optional(*_inside("gru_param", **_INITIALIZED)),
    ),
    Layer_t.MatrixMultiply: _optional(*_plain("transpose_b")),
    Layer_t.MultiHeadAttention: (*_plain("num_attention_heads"), *_optional(*_plain("transpose_b"))),
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

LOSSES = (Layer_t.BinaryCrossEntropyLoss, Layer_t.CrossEntropyLoss, Layer_t.MultiCrossEntropyLoss)
"""Kinds whose JSON may have a ``regularizer``, which stands for use_regularizer and regularizer_type at once."""
