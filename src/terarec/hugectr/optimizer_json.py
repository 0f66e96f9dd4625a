"""Optimizers as JSON: of embeddings in a graph, and of a model with its learning rate in a training file."""

from __future__ import annotations

from typing import Any

from terarec.hugectr.enums import Optimizer_t, Update_t
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.json_object import JsonObject
from terarec.hugectr.tables.kinds import TRUTH, named_member
from terarec.hugectr.tables.optimizer import CREATE_OPTIMIZER_3_0, OptimizerWithSchedule, OptParamsPy
from terarec.hugectr.tables.optimizer_json import HYPERPARAMETERS, SCHEDULE
from terarec.hugectr.tables.table import Table


def optimizer_to_json(optimizer: OptParamsPy) -> dict[str, Any]:
    """`optimizer` as what `json.dumps` takes."""
    clause, keys = HYPERPARAMETERS[optimizer.optimizer_type]
    return {
        "update_type": optimizer.update_type.name,
        "type": optimizer.optimizer_type.name,
        clause: {key: getattr(optimizer, key) for key in keys},
    }


def read_optimizer(data: JsonObject) -> OptParamsPy:
    """The optimizer in `data`; a learning rate there is the solver's affair.

    Raises:
        WrongInputError: an unknown kind or key, or a value that is not accepted.
    """
    given = _read(data, OptParamsPy.FORMS[0])
    try:
        return OptParamsPy(**{name: value for name, value in given.items() if name not in SCHEDULE})
    except WrongInputError as error:
        raise WrongInputError(f"{data.where}: {error}") from None


def read_optimizer_with_schedule(data: JsonObject) -> OptimizerWithSchedule:
    """The optimizer and its learning rate in the clause ``optimizer`` of a training file.

    Raises:
        WrongInputError: an unknown kind or key, or a value that is not accepted.
    """
    given = _read(data, CREATE_OPTIMIZER_3_0)
    try:
        return OptimizerWithSchedule(**given)
    except WrongInputError as error:
        raise WrongInputError(f"{data.where}: {error}") from None


def _read(data: JsonObject, table: Table) -> dict[str, Any]:
    rows = {row.name: row for row in (*CREATE_OPTIMIZER_3_0.rows, *table.rows)}
    kind = data.take("type", named_member(Optimizer_t))
    given: dict[str, Any] = {"optimizer_type": kind, "update_type": Update_t.Local}
    if data.take("global_update", TRUTH, False):
        given["update_type"] = Update_t.Global
    given["update_type"] = data.take("update_type", named_member(Update_t), given["update_type"])
    clause, keys = HYPERPARAMETERS[kind]
    values = data.child(clause)
    for key in (*keys, *SCHEDULE):
        if values.has(key):
            given[key] = values.take(key, rows[key].kind)
    values.finish()
    # A file may hold the parameters of other kinds, too; they say nothing.
    data.finish([name for name, _ in HYPERPARAMETERS.values()])
    return given
