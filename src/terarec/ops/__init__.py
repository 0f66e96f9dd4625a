"""The ops: one file each. Those of embedding tables have a schema, a fake, a backward and the choice of a kernel."""

from terarec.ops.bag_lookup import bag_lookup, key_weight_gradient, quantize_rows, quantized_bag_lookup
from terarec.ops.layout import BagLayout
from terarec.ops.linear import linear, linear_relu
from terarec.ops.onednn import linear_choice
from terarec.ops.pair_dots import pair_dots, supports_pair_dots
from terarec.ops.row_update import (
    BagGradient,
    RowRule,
    row_gradient_norm,
    row_rule,
    row_update_,
    state_dtype,
    state_shapes,
)

__all__ = [
    "BagGradient",
    "BagLayout",
    "RowRule",
    "bag_lookup",
    "key_weight_gradient",
    "linear",
    "linear_choice",
    "linear_relu",
    "pair_dots",
    "quantize_rows",
    "quantized_bag_lookup",
    "row_gradient_norm",
    "row_rule",
    "row_update_",
    "state_dtype",
    "state_shapes",
    "supports_pair_dots",
]
