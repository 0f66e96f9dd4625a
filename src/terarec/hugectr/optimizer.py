"""hugectr.optimizer of 3.0: optimizers that know their learning rate."""

from terarec.hugectr.tables.optimizer import OptimizerWithSchedule

CreateOptimizer = OptimizerWithSchedule

__all__ = ["CreateOptimizer", "OptimizerWithSchedule"]
