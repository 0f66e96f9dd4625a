"""The eviction scan: PyTorch's own passes over memory are as fast as it goes."""

from terarec.kernels.ref.row_scan import rows_at_most

__all__ = ["rows_at_most"]
