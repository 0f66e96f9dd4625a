# SPDX-License-Identifier: Apache-2.0
"""Weights of a session that are replaced while batches use them."""

import threading

from torch import nn

from terarec.etl.workflow.datasets import identity_workflow
from terarec.serve.record_inputs import RecordInputs
from terarec.serve.weights import CurrentWeights, SessionWeights
from terarec.spec import CategoricalColumn, DatasetSpec, DLRMSpec, LabelColumn, RunSpec
from tests.waiting import PATIENCE

DATASET = DatasetSpec(
    name="shops",
    storage="parquet",
    labels=(LabelColumn(name="click"),),
    dense=(),
    categorical=(CategoricalColumn(name="shop", rows=4),),
)
RUN = RunSpec(data="shops", model=DLRMSpec())


def weights(step: int) -> SessionWeights:
    layers = nn.Linear(1, 1)
    inputs = RecordInputs(identity_workflow(DATASET), DATASET)
    return SessionWeights(model=layers, trained=layers, inputs=inputs, run=RUN, step=step)


def test_replacing_waits_for_the_batches_that_use_the_former_weights_and_for_no_others() -> None:
    current = CurrentWeights(weights(1))
    is_replaced = threading.Event()

    def replace() -> None:
        current.replace(weights(2))
        is_replaced.set()

    with current.pinned() as first, current.pinned() as also_first:
        thread = threading.Thread(target=replace)
        thread.start()
        while current.current.step == 1:
            assert not is_replaced.is_set()
        with current.pinned() as second:
            assert (first.step, also_first.step, second.step) == (1, 1, 2)
            assert not is_replaced.wait(0.05)
        newest = current.pinned()
        newest.__enter__()
    # The batch of the newest weights is still under way.
    assert is_replaced.wait(PATIENCE)
    thread.join()
    newest.__exit__(None, None, None)


def test_a_batch_that_fails_keeps_no_pin() -> None:
    current = CurrentWeights(weights(1))
    try:
        with current.pinned():
            raise ValueError
    except ValueError:
        current.replace(weights(2))
    assert current.current.step == 2
