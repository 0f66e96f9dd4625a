# SPDX-License-Identifier: Apache-2.0
"""The ops: one file each. Those of embedding tables have a schema, a fake, a backward and the choice of a kernel."""

from terarec.ops.bag_lookup import bag_lookup, quantize_rows, quantized_bag_lookup
from terarec.ops.layout import BagLayout

__all__ = ["BagLayout", "bag_lookup", "quantize_rows", "quantized_bag_lookup"]
