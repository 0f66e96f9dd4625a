"""Launchers of the compiled core: they check what its raw pointers cannot, and turn its reports into errors."""

from terarec.kernels.cpu.bag_lookup import bag_lookup
from terarec.kernels.cpu.host import features, threads
from terarec.kernels.cpu.row_update import row_update_
from terarec.kernels.cpu.rows import allocate_rows, fill_rows

__all__ = ["allocate_rows", "bag_lookup", "features", "fill_rows", "row_update_", "threads"]
