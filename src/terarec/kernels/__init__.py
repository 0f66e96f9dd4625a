"""Raw compute without gradients: `ref` is plain PyTorch and the oracle, `cpu` the compiled core.

`registry` chooses between them; `rows` allocates and initialises arenas; `contract` says what a kernel takes.
"""

from terarec.kernels.contract import RowRule
from terarec.kernels.registry import Choice, active, available
from terarec.kernels.rows import allocate_rows, initialise_rows

__all__ = ["Choice", "RowRule", "active", "allocate_rows", "available", "initialise_rows"]
