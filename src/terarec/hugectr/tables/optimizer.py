"""CreateOptimizer, and hugectr.optimizer.CreateOptimizer of 3.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from terarec.hugectr.enums import Optimizer_t, Update_t
from terarec.hugectr.tables.kinds import TRUTH, member, number
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.schedule import WARM_UP_AND_DECAY, decay_has_steps
from terarec.hugectr.tables.table import Parameter, Status, Table


def _lazy_is_adams(values: Mapping[str, Any]) -> str | None:
    if values["update_type"] is Update_t.LazyGlobal and values["optimizer_type"] is not Optimizer_t.Adam:
        return f"update_type: got LazyGlobal with {values['optimizer_type'].name}, expected it with Adam alone"
    return None


_TYPE = (
    Parameter(name="optimizer_type", kind=member(Optimizer_t), default=Optimizer_t.Adam, meaning="its kind"),
    Parameter(
        name="update_type", kind=member(Update_t), default=Update_t.Global, meaning="which rows of a table a step moves"
    ),
)
_FTRL = (
    Parameter(name="beta", kind=number(0.0), default=0.0, since="4.3", meaning="Ftrl's beta"),
    Parameter(name="lambda1", kind=number(0.0), default=0.0, since="4.3", meaning="Ftrl's L1"),
    Parameter(name="lambda2", kind=number(0.0), default=0.0, since="4.3", meaning="Ftrl's L2"),
)
_ADAM = (
    Parameter(name="beta1", kind=number(0.0, 1.0), default=0.9, meaning="Adam's decay of the mean"),
    Parameter(name="beta2", kind=number(0.0, 1.0), default=0.999, meaning="Adam's decay of the variance"),
    Parameter(name="epsilon", kind=number(0.0), default=1e-7, meaning="Adam's and AdaGrad's epsilon"),
)
_ACCUMULATOR = Parameter(
    name="initial_accu_value", kind=number(0.0), default=0.0, since="3.1", meaning="AdaGrad's first sum of squares"
)
_MOMENTUM = Parameter(
    name="momentum_factor", kind=number(0.0, 1.0), default=0.0, meaning="factor of MomentumSGD and Nesterov"
)
_ATOMIC = Parameter(
    name="atomic_update",
    kind=TRUTH,
    default=True,
    status=Status.IGNORED,
    why="the gradients of a key are summed in a fixed order either way",
    meaning="SGD adds to a row once per occurrence",
)

CREATE_OPTIMIZER = Table(
    name="CreateOptimizer",
    meaning="an optimizer of the dense layers, of an embedding, or of both",
    rows=(*_TYPE, *_FTRL, *_ADAM, _ACCUMULATOR, _MOMENTUM, _ATOMIC),
    rules=(_lazy_is_adams,),
)


def _has_no_ftrl(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    # Ftrl's three numbers came between; for another optimizer the first of them says nothing unless it is 0.
    return len(args) > 2 and args[0] is not Optimizer_t.Ftrl and args[2] != 0


CREATE_OPTIMIZER_3_1 = Table(
    name="CreateOptimizer",
    meaning="an optimizer, by place (3.1 to 4.2)",
    rows=(*_TYPE, *_ADAM, _ACCUMULATOR, _MOMENTUM, _ATOMIC),
    rules=(_lazy_is_adams,),
    fits=_has_no_ftrl,
    derive=lambda values: {row.name: row.default for row in _FTRL},
)
CREATE_OPTIMIZER_3_0 = Table(
    name="optimizer.CreateOptimizer",
    meaning="an optimizer with its learning rate (3.0)",
    rows=(
        *(replace(row, until="3.0") for row in _TYPE),
        Parameter(name="learning_rate", kind=number(0.0), default=0.001, until="3.0", meaning="base learning rate"),
        *(replace(row, until="3.0") for row in (*WARM_UP_AND_DECAY, *_ADAM, _MOMENTUM, _ATOMIC)),
        Parameter(
            name="use_mixed_precision",
            kind=TRUTH,
            default=False,
            until="3.0",
            status=Status.IGNORED,
            why="the solver's own use_mixed_precision decides",
            meaning="the model trains in 16 bits",
        ),
    ),
    rules=(_lazy_is_adams, decay_has_steps),
    derive=lambda values: {row.name: row.default for row in (*_FTRL, _ACCUMULATOR)},
)


class OptParamsPy(Record, forms=(CREATE_OPTIMIZER, CREATE_OPTIMIZER_3_1)):
    """What `CreateOptimizer` makes; every argument is an attribute."""


class OptimizerWithSchedule(OptParamsPy, forms=(CREATE_OPTIMIZER_3_0,)):
    """What `hugectr.optimizer.CreateOptimizer` of 3.0 makes: an optimizer that knows its learning rate."""
