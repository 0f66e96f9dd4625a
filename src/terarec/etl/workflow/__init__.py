"""Feature workflows: their order of work, their saved form, and what they make of blocks and of records."""

from terarec.etl.workflow.inverse import IdValues
from terarec.etl.workflow.plan import Pass, Plan, plan, source_types
from terarec.etl.workflow.raw_values import RawValues
from terarec.etl.workflow.serving import EncodedRecords
from terarec.etl.workflow.transform import run_steps
from terarec.etl.workflow.workflow import Workflow, identity_workflow, workflow_of

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
