# SPDX-License-Identifier: Apache-2.0
"""A model trains on one device, from which everything of it takes its place."""

import pytest
import torch

from terarec.hugectr.sharding import placement
from terarec.nn.precision import mixed_precision
from tests.hugectr import families


@pytest.mark.parametrize(
    ("vvgpu", "num_gpus", "device", "message"),
    [
        ([[0]], 1, "cuda:0", ""),
        ([[1]], 2, "cuda:1", ""),
        ([[3]], 2, "cuda:0", "vvgpu names GPU 3, which is not there: training runs on cuda:0, with the same results"),
        ([[0]], 0, "cpu", "vvgpu names GPU 0, which is not there: training runs on cpu, with the same results"),
        ([[9, 1, 0]], 2, "cuda:1", "vvgpu names 3 devices: training runs on cuda:1, with the same results"),
        ([[0], [0]], 1, "cuda:0", "vvgpu names 2 devices: training runs on cuda:0, with the same results"),
        ([[0, 1], [0, 1]], 0, "cpu", "vvgpu names 4 devices: training runs on cpu, with the same results"),
    ],
)
def test_training_runs_on_the_available_device(vvgpu, num_gpus, device, message):
    assert placement(vvgpu, num_gpus) == (torch.device(device), message)


def test_weights_tables_states_and_tensors_are_where_the_placement_says(planted):
    made = families.wide_deep(*planted[:2])
    made.start_data_reading()
    made.train()
    made.eval()
    trainer, place = made._compiled("trainer").trainer, placement([[0]])[0]
    assert made.module.device == place
    arenas = [arena for name in made.module.embeddings for arena in made.module.collection(name).arenas]
    held = [tensor for arena in arenas for tensor in (arena.weights, *arena.state.values())]
    held += [value for state in trainer.optimizers.dense.state.values() for value in state.values()]
    held += [*made.module.parameters(), *made.module.buffers(), *trainer.output.values()]
    assert len(held) > 20
    assert {tensor.device.type for tensor in held if tensor.dim()} == {place.type}


@pytest.mark.parametrize(("loss_scale", "expected"), [(1.0, {"bf16", "fp16"}), (1024.0, {"fp16"})])
def test_a_scaled_loss_selects_fp16_on_a_gpu(loss_scale, expected):
    assert mixed_precision(torch.device("cuda"), loss_scale=loss_scale) in expected
