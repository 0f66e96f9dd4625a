# SPDX-License-Identifier: Apache-2.0
"""A workflow whose data set every storage can hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from terarec.etl.ops import Pad
from terarec.etl.workflow import Workflow
from tests.etl.engine.contents import contents
from tests.etl.engine.logs import shop_workflow


def fixed_width(*categorical: str) -> Workflow:
    """These columns of the shop. Lists are padded, which all storages but HugeCTR's Raw can hold."""
    base = shop_workflow().spec
    steps = (*base.steps, Pad(columns=("seen",), length=4, value=0))
    return Workflow.of(dataclasses.replace(base, steps=steps, dense=("price",), categorical=categorical))


def data_files(out: Path) -> dict[str, bytes]:
    """What a trainer reads."""
    return {name: content for name, content in contents(out).items() if not name.startswith("workflow")}
