"""What the tests of runs compare and vary."""

import dataclasses

import torch

from terarec.models.state import dense_state, tables
from terarec.spec import RunSpec


def changed(spec: RunSpec, **training) -> RunSpec:
    """`spec` with other fields of ``training``."""
    return dataclasses.replace(spec, training=dataclasses.replace(spec.training, **training))


def weights(model) -> dict[str, torch.Tensor]:
    """Copies of all weights and row optimizer states, by key."""
    copies = {name: tensor.clone() for name, tensor in dense_state(model).items()}
    for name, table in tables(model).items():
        (rows,) = table.export_chunks(max(1, len(table)))
        order = rows.keys.argsort()
        held = {"keys": rows.keys, "weights": rows.weights, **rows.state, **rows.uses}
        copies |= {f"{name}/{key}": value[order].clone() for key, value in held.items()}
    return copies


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal to the bit."""
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert different == []
