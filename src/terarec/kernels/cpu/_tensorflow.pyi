# SPDX-License-Identifier: Apache-2.0

import numpy as np
from numpy.typing import NDArray

class Table:
    @property
    def grows(self) -> bool: ...
    def size(self) -> int: ...
    def have_states(self, states: int, initial: float) -> None: ...
    def lookup(
        self,
        ids: NDArray[np.int64],
        row_splits: NDArray[np.int64],
        weights: NDArray[np.float32],
        pooling: int,
        absent: int,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]: ...
    def merge(
        self,
        ids: NDArray[np.int64],
        row_splits: NDArray[np.int64],
        weights: NDArray[np.float32],
        grad: NDArray[np.float32],
        pooling: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]: ...
    def weight_gradient(
        self,
        ids: NDArray[np.int64],
        row_splits: NDArray[np.int64],
        weights: NDArray[np.float32],
        grad: NDArray[np.float32],
        pooling: int,
    ) -> NDArray[np.float32]: ...
    def apply(
        self,
        ids: NDArray[np.int64],
        grads: NDArray[np.float32],
        numbers: NDArray[np.float64],
        step: int,
        rule: int,
    ) -> None: ...
    def change(self, ids: NDArray[np.int64], values: NDArray[np.float32], kind: int) -> None: ...
    def set_state(self, state: int, ids: NDArray[np.int64], values: NDArray[np.float32]) -> None: ...
    def read(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], list[NDArray[np.float32]], NDArray[np.int64], float]: ...
    def replace(
        self,
        ids: NDArray[np.int64],
        rows: NDArray[np.float32],
        states: list[NDArray[np.float32]],
        clock: NDArray[np.int64],
        initial: float | None,
    ) -> None: ...
    def since(self, microseconds: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]: ...

def new_table(
    name: str,
    width: int,
    rows: int,
    most_rows: int,
    offset: float,
    scale: float,
    normal: bool,
    seed: int,
    forgets: bool,
    narrow: bool,
    admitted: float,
) -> tuple[Table, int]: ...
def join(rank: int, sockets: list[int], limit_seconds: float) -> None: ...
def leave() -> None: ...
def exchange(what: str, parts: list[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]: ...
def rule_number(kind: str) -> int: ...
def number_names() -> list[str]: ...
def set_threads(threads: int) -> None: ...
def select(name: str) -> bool: ...
