"""The kernels in plain PyTorch and NumPy: the oracle of the tests, and what runs where nothing faster does."""

from terarec.kernels.ref.bag_lookup import bag_lookup
from terarec.kernels.ref.row_init import allocate_rows, fill_rows
from terarec.kernels.ref.row_update import row_update_

__all__ = ["allocate_rows", "bag_lookup", "fill_rows", "row_update_"]
