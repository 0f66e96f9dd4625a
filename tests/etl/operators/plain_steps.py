"""Does a step to the rows of a block by its functions on plain values."""

from typing import Any

import numpy as np

from terarec.etl.columns import Block
from terarec.etl.operators import OperatorCode
from terarec.etl.operators.plain_arrow import plain_of_column, python_of_plain
from terarec.etl.operators.plain_function import as_numbers
from tests.etl.operators.fitting import types_of


def written_plainly(code: OperatorCode, state: Any, block: Block) -> list[tuple[str, list[Any]]]:
    """Each output of each function, with its values; of a step whose inputs are all in `block`."""
    types = types_of(block)
    plain = {name: plain_of_column(column) for name, column in block.columns.items()}
    kinds = {**types, **code.output_types(types)}
    written = []
    for function in code.plain_functions(types, state):
        values = [plain[name] for name in function.reads]
        made = function.call(*([np.stack(list(map(as_numbers, values)))] if function.takes == "matrix" else values))
        for name, found in zip(function.writes, made, strict=True):
            kind = "number" if function.gives == "matrix" else kinds[name].kind
            written.append((name, python_of_plain(found, kind)))
    return written
