# SPDX-License-Identifier: Apache-2.0
"""A whole model in evaluation: compiled, and exported, saved and loaded, with the lookup op in its graph."""

import io

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from terarec.batch import Batch, Jagged
from terarec.models import DLRM
from terarec.spec import DLRMSpec
from tests.models.planted import planted_batch, planted_dataset


@pytest.fixture
def model() -> DLRM:
    return DLRM(DLRMSpec(width=8, bottom=(16, 8), top=(32, 16)), planted_dataset(), seed=1).eval()


class OnTensors(nn.Module):
    """The model over plain tensors, which an exported program takes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, keys: Tensor, offsets: Tensor) -> Tensor:
        sparse = Jagged(names=("a", "b"), keys=keys, offsets=offsets)
        return self.model(Batch(dense=dense, label=dense[:, :1], sparse=sparse))


def tensors(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.dense, batch.sparse.keys, batch.sparse.offsets


def test_an_exported_model_gives_the_same_scores(model: DLRM) -> None:
    any_size = {0: torch.export.Dim.AUTO}
    program = torch.export.export(OnTensors(model), tensors(planted_batch(9)), dynamic_shapes=(any_size,) * 3)
    assert sum("terarec.bag_lookup" in str(node.target) for node in program.graph.nodes) == 1
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for size in (9, 2, 40):
        batch = planted_batch(size, seed=size)
        with torch.no_grad():
            torch.testing.assert_close(loaded(*tensors(batch)), model(batch))


@pytest.mark.slow
def test_one_graph_serves_every_batch_size(model: DLRM) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for size in (9, 10, 3, 40):
            batch = planted_batch(size, seed=size)
            torch.testing.assert_close(compiled(batch), model(batch))
    assert counter.frame_count == 2  # the first size alone, then any


@pytest.mark.slow
def test_d11_a_model_exports_with_a_batch_as_its_input(model: DLRM) -> None:
    any_size = {0: torch.export.Dim.AUTO}
    sizes = [any_size, any_size, [any_size, any_size, None]]
    program = torch.export.export(model, (planted_batch(9),), dynamic_shapes=(sizes,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for size in (9, 40):
        batch = planted_batch(size, seed=size)
        with torch.no_grad():
            torch.testing.assert_close(loaded(batch), model(batch))
