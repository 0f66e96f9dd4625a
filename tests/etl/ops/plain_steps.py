"""Does a step to the rows of a block by its functions on plain values."""

from typing import Any

import numpy as np

from terarec.etl.columns import Block
from terarec.etl.ops import Operator
from terarec.etl.ops.record_values import as_numbers, python_of_values, values_of_column
from tests.etl.ops.fitting import types_of


def written_plainly(code: Operator, state: Any, block: Block) -> list[tuple[str, list[Any]]]:
    """Each output of each function, with its values; of a step whose inputs are all in `block`."""
    types = types_of(block)
    plain = {name: values_of_column(column) for name, column in block.columns.items()}
    kinds = {**types, **code.output_types(types)}
    written = []
    for function in code.record_functions(types, state):
        values = [plain[name] for name in function.reads]
        made = function.call(*([np.stack(list(map(as_numbers, values)))] if function.takes == "matrix" else values))
        for name, found in zip(function.writes, made, strict=True):
            kind = "number" if function.gives == "matrix" else kinds[name].kind
            written.append((name, python_of_values(found, kind)))
    return written
