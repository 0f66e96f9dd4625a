"""The code of the operators: one file for each, found by `implementation`. Described in docs/workflows.md."""

from terarec.etl.operators.contract import ColumnTypes, OperatorCode, SpillOptions, Stage, State, Statistic
from terarec.etl.operators.number_step import NumberStepCode
from terarec.etl.operators.registry import implementation
from terarec.etl.operators.step_code import StepCode

__all__ = [
    "ColumnTypes",
    "NumberStepCode",
    "OperatorCode",
    "SpillOptions",
    "Stage",
    "State",
    "Statistic",
    "StepCode",
    "implementation",
]
