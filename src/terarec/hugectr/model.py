"""`Model`: what a script builds, trains, evaluates and saves."""

from __future__ import annotations

from typing import Any

from terarec.hugectr.model_training import ModelTraining
from terarec.hugectr.tables.calls import MODEL
from terarec.hugectr.tables.optimizer import OptParamsPy
from terarec.hugectr.tables.table import taking


class Model(ModelTraining):
    """A model, its data and its training.

    Attributes:
        solver: what `CreateSolver` made.
        reader_params: the `DataReaderParams`; of release 3.0 the `Input`, which says the same.

    Args:
        solver: what `CreateSolver` made.
        reader_params: where the data is. Release 3.0 has none: there the optimizer is the second argument.
        opt_params: what `CreateOptimizer` made.
        etc_params: what `CreateETC` or `CreateMOS` made, for training pass by pass.

    Raises:
        WrongInputError: anything else.
    """

    @taking(MODEL)
    def __init__(self, solver: Any, reader_params: Any, opt_params: Any, etc_params: Any) -> None:
        if isinstance(reader_params, OptParamsPy):
            reader_params, opt_params = None, reader_params
        super().__init__(solver, reader_params, opt_params, etc_params)
