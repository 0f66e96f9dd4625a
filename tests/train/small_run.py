# SPDX-License-Identifier: Apache-2.0
"""Values that the tests of runs compare and vary."""

import dataclasses

import torch

from terarec.models.artifact import dense_state, tables
from terarec.spec import RunSpec


def changed(spec: RunSpec, **training) -> RunSpec:
    """`spec` with other fields of ``training``."""
    return dataclasses.replace(spec, training=dataclasses.replace(spec.training, **training))


def weights(model) -> dict[str, torch.Tensor]:
    """Return the copies of all weights and row optimizer states, by key."""
    copies = {name: tensor.clone() for name, tensor in dense_state(model).items()}
    for name, table in tables(model).items():
        chunks = [
            {"keys": rows.keys, "weights": rows.weights, **rows.state, **rows.uses}
            for rows in table.export_chunks(max(1, len(table)))
        ]
        held = {key: torch.cat([chunk[key] for chunk in chunks]) for key in chunks[0]}
        order = held["keys"].argsort()
        copies |= {f"{name}/{key}": value[order] for key, value in held.items()}
    return copies


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal to the bit."""
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert different == []
