"""Feature workflows: the plan of their steps, their saved form, and the transform of blocks and records."""

from terarec.etl.workflow.datasets import IdValues, identity_workflow, workflow_of
from terarec.etl.workflow.plan import Pass, Plan, plan, source_types
from terarec.etl.workflow.raw_values import RawValues
from terarec.etl.workflow.serving import EncodedRecords
from terarec.etl.workflow.transform import run_steps
from terarec.etl.workflow.workflow import Workflow

__all__ = [
    "EncodedRecords",
    "IdValues",
    "Pass",
    "Plan",
    "RawValues",
    "Workflow",
    "identity_workflow",
    "plan",
    "run_steps",
    "source_types",
    "workflow_of",
]
