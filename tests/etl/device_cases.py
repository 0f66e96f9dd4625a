"""Raw rows that are transformed on a device, against the workflow on the CPU."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from terarec.etl.columns import RowFaultError
from terarec.etl.device import DeviceTransform
from terarec.etl.tensors import TensorDevice
from tests.etl.column_values import block_of
from tests.etl.ops.fitting import fit as fit_step
from tests.etl.ops.test_fitted_contract import rows
from tests.etl.test_device import FITTED, STATELESS, check_batches, check_same, fitted_in, raw_batch
from tests.on_device import Case, keep_in

CASES: dict[str, Case] = {}
case = keep_in(CASES)


@case
def every_step_without_a_state(device: torch.device) -> None:
    there = TensorDevice(device)
    for each in STATELESS:
        check_same(each.step, None, block_of(**each.inputs), there)


@case
def every_fitted_step(device: torch.device) -> None:
    there = TensorDevice(device)
    for step in FITTED:
        check_same(step, fit_step(step, [rows(300)]), rows(200, seed=6), there)
        check_same(step, fit_step(step, [rows(0)]), rows(20), there)


@case
def a_workflow_and_what_it_rejects(device: torch.device) -> None:
    with TemporaryDirectory() as directory:
        fitted = fitted_in(Path(directory))
    check_batches(fitted, device)
    with pytest.raises(RowFaultError) as error:
        DeviceTransform(fitted, device)(raw_batch(items=[[1], [2, 10], [], [10, -1], [], []]))
    assert error.value.rows.tolist() == [1, 3]
