# SPDX-License-Identifier: Apache-2.0
"""Feature workflows: the plan of their steps, their saved form, and the transform of blocks and records."""

from terarec.etl.workflow.datasets import ValueNames, workflow_of
from terarec.etl.workflow.plan import plan
from terarec.etl.workflow.workflow import Workflow

__all__ = ["ValueNames", "Workflow", "plan", "workflow_of"]
