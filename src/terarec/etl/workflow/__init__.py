"""Feature workflows: their order of work, their saved form, and what they make of blocks and of records."""

from terarec.etl.workflow.encoded_records import EncodedRecords
from terarec.etl.workflow.execution import run_steps
from terarec.etl.workflow.given import given_workflow, workflow_of
from terarec.etl.workflow.id_values import IdValues
from terarec.etl.workflow.plan import Pass, Plan, plan, source_types
from terarec.etl.workflow.raw_column import RawValues
from terarec.etl.workflow.workflow import Workflow

__all__ = [
    "EncodedRecords",
    "IdValues",
    "Pass",
    "Plan",
    "RawValues",
    "Workflow",
    "given_workflow",
    "plan",
    "run_steps",
    "source_types",
    "workflow_of",
]
