# SPDX-License-Identifier: Apache-2.0
"""Helpers of operator tests: fit on blocks as an engine does, save and load states, run record functions."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from terarec.etl.columns import ColumnType, Rows, concatenate_rows, is_list, kind_of
from terarec.etl.ops import Operator
from terarec.etl.ops.states import SpillOptions
from terarec.etl.ops.values import as_numbers, python_of_values, values_of_array


def types_of(block: Rows) -> dict[str, ColumnType]:
    return {name: ColumnType(kind_of(column), is_list(column)) for name, column in block.columns.items()}


def blocks_of(block: Rows, rows: int) -> list[Rows]:
    """`block` in parts of so many rows; one empty part where it has none."""
    return [block.slice(start, min(start + rows, block.num_rows)) for start in range(0, block.num_rows, rows)] or [
        block
    ]


def fit(
    step: Operator | Operator,
    blocks: Sequence[Rows],
    *,
    memory_bytes: int | None = None,
    threads: int = 1,
    types: Mapping[str, ColumnType] | None = None,
) -> Any:
    """The state after the training rows of `blocks`."""
    code = step
    with TemporaryDirectory() as directory:
        statistic = code.statistic(
            types or types_of(blocks[0]), SpillOptions(directory=Path(directory), memory_bytes=memory_bytes)
        )
        with ThreadPoolExecutor(threads) as pool:
            for partial in pool.map(lambda block: statistic.observe(block.training()), blocks):
                statistic.merge(partial)
        return statistic.finish()


def saved(code: Operator, state: Any) -> Any:
    """`state` once it was written and read."""
    with TemporaryDirectory() as directory:
        state.save(Path(directory), "07-step")
        return code.load_state(Path(directory), "07-step")


def files_of(state: Any) -> dict[str, bytes]:
    """What `state` saves."""
    with TemporaryDirectory() as directory:
        state.save(Path(directory), "step")
        return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir())}


def apply(code: Operator, state: Any, blocks: Sequence[Rows]) -> Rows:
    """The step done to all blocks."""
    return concatenate_rows([code.transform(block, state) for block in blocks])


def run_record_functions(code: Operator, state: Any, block: Rows) -> list[tuple[str, list[Any]]]:
    """Return each output of each record function with its values, for a step whose inputs are all in `block`."""
    types = types_of(block)
    plain = {name: values_of_array(column) for name, column in block.columns.items()}
    kinds = {**types, **code.output_types(types)}
    written = []
    for function in code.record_functions(types, state):
        values = [plain[name] for name in function.reads]
        made = function.call(*([np.stack(list(map(as_numbers, values)))] if function.takes == "matrix" else values))
        for name, found in zip(function.writes, made, strict=True):
            kind = "number" if function.gives == "matrix" else kinds[name].kind
            written.append((name, python_of_values(found, kind)))
    return written
