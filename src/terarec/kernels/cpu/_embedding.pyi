from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from terarec.kernels.contract import KernelGradient

_Report = tuple[int, int, int, int, int]

def use_exchange_api(api: object) -> None: ...
def lookup_fits(
    weights: Tensor,
    keys: Tensor,
    offsets: Tensor,
    key_weights: Tensor | None,
    grad: Tensor | None,
    extents: tuple[int, int, int, bool, bool],
    /,
) -> bool: ...
def bag_lookup(
    weights: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: Tensor,
    is_pooled: bool,
    key_weights: Tensor | None,
    empty: Callable[[int, int], Tensor],
    threads: int,
    /,
) -> Tensor | _Report: ...
def row_dots(
    weights: Tensor,
    keys: Tensor,
    offsets: Tensor,
    grad: Tensor,
    layout: Tensor,
    dots: Tensor,
    threads: int,
    /,
) -> _Report: ...
def mask_gradient(grad: Tensor, part: Tensor, masked: Tensor, sums: Tensor, threads: int, /) -> None: ...
def has_pair_dots() -> bool: ...
def dot_pairs(first: Tensor, others: Tensor, out: Tensor, threads: int, /) -> None: ...
def pair_gradients(
    grad: Tensor, first: Tensor, others: Tensor, grad_first: Tensor, grad_others: Tensor, threads: int, /
) -> None: ...

class RowRule:
    lr: float
    eps: float
    eps_hat: float
    beta1: float
    beta2: float
    beta: float
    weight_decay: float
    l1: float
    l2: float
    grad_scale: float
    clip_value: float
    clip_norm: float
    lr_in_momentum: bool
    updates_all_rows: bool
    catches_up: bool
    def __init__(self, kind: str) -> None: ...

def row_update(
    weights: Tensor,
    state: Sequence[Tensor | None],
    gradients: Sequence[KernelGradient],
    rule: RowRule,
    step: int,
    rounding_seed: int,
    table_lr: Tensor | None,
    threads: int,
) -> _Report: ...
def gradient_squares(
    weights: Tensor, first_row: int, gradients: Sequence[KernelGradient], table_lr: Tensor | None, threads: int, /
) -> tuple[_Report, float]: ...
def allocate_rows(shape: Sequence[int], threads: int) -> NDArray[np.float32] | None: ...
def allocate_result(rows: int, columns: int) -> NDArray[np.float32] | None: ...
def fill_rows(
    rows: int, num_rows: int, width: int, first_row: int, seed: int, scale: float, normal: bool, threads: int
) -> None: ...
def fill_keyed_rows(
    addresses: Sequence[int], num_rows: int, width: int, seed: int, scale: float, normal: bool, threads: int
) -> None: ...
def reserve(num_bytes: int) -> NDArray[np.uint8] | None: ...
def commit(address: int, begin: int, end: int) -> bool: ...
def select(name: str) -> bool: ...
def selected() -> str: ...
def runnable() -> list[str]: ...
def parallel_runtime() -> str: ...

class HashIndex:
    def __init__(self, seed: int) -> None: ...
    def size(self) -> int: ...
    def memory_bytes(self) -> int: ...
    @staticmethod
    def pool_bytes() -> int: ...
    def find(self, keys: int, size: int, rows: int, threads: int, /) -> int: ...
    def insert(
        self,
        keys: int,
        size: int,
        rows: int,
        free_rows: int,
        num_free: int,
        next_row: int,
        new_keys: int,
        threads: int,
        /,
    ) -> int: ...
    def assign(self, keys: int, size: int, rows: int, threads: int, /) -> None: ...
    def count(self, keys: int, size: int, rows: int, threads: int, /) -> None: ...
    def erase(self, keys: int, size: int, rows: int, threads: int, /) -> None: ...
    def items(self, start: int, most: int, keys: int, rows: int, /) -> tuple[int, int]: ...
