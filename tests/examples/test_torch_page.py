# SPDX-License-Identifier: Apache-2.0
"""docs/torch.md is true: its Python runs, and the errors that it lists are raised with the text that it shows."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import terarec
from terarec.batch import one_hot
from terarec.data import Reader
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.export import export_onnx
from terarec.optim import RowOptimizer
from terarec.spec import DynamicTableSpec, FeatureSpec, SGDSpec, TableSpec
from tests.data.sources import TinyGroups, first_of_workers

PAGE = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()
KEYS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def test_the_python_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "torch.md", "exec"), names)
    assert names["rows"].num_steps == 3
    assert set(names["saved"]) == {"model", "rows", "dense"}


def trained(**table: object) -> tuple[nn.ModuleDict, RowOptimizer]:
    """A model of two tables after a backward pass."""
    tables = [TableSpec(name=name, rows=9, width=4) for name in ("item", "shop")]
    collection = EmbeddingCollection(tables, [FeatureSpec(name=name, table=name) for name in ("item", "shop")])
    model = nn.ModuleDict({"embedding": collection})
    rows = RowOptimizer(model, SGDSpec())
    collection(one_hot(["item", "shop"], KEYS)).pooled.sum().backward()
    return model, rows


def penalty() -> None:
    model, _ = trained()
    sum(parameter.pow(2).sum() for parameter in model.parameters())


def clipped_by_value() -> None:
    model, _ = trained()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def two_row_optimizers() -> None:
    model, rows = trained()
    RowOptimizer(model, SGDSpec())
    rows.step()


def copied() -> None:
    copy.deepcopy(trained()[1])


def in_two_groups() -> None:
    model, rows = trained()
    rows.add_param_group({"params": model, "lr": 9.0})


def two_optimizers() -> None:
    bag = terarec.EmbeddingBag(9, 4, mode="sum")
    RowOptimizer(bag, SGDSpec())
    dense = torch.optim.Adam(bag.parameters())
    bag(KEYS).sum().backward()
    dense.step()


def parameters() -> None:
    model, _ = trained()
    RowOptimizer(model.parameters(), SGDSpec())


def loaded_too_early() -> None:
    def made() -> tuple[EmbeddingCollection, RowOptimizer]:
        tables = [DynamicTableSpec(name="user", width=4)]
        collection = EmbeddingCollection(tables, [FeatureSpec(name="who", table="user")])
        return collection, RowOptimizer(collection, SGDSpec())

    collection, rows = made()
    collection(one_hot(["who"], KEYS[:1])).pooled.sum().backward()
    rows.step()
    made()[1].load_state_dict(rows.state_dict())


def read_by_workers() -> None:
    first_of_workers(DataLoader(Reader(TinyGroups((10,)), batch_size=4), batch_size=None, num_workers=2))


def exported() -> None:
    export_onnx(nn.Linear(2, 1), Path("never-written.onnx"))


RAISES: dict[str, Callable[[], None]] = {
    "arithmetic on `model.parameters": penalty,
    "`clip_grad_value_`": clipped_by_value,
    "after another one was made": two_row_optimizers,
    "`copy.deepcopy` or pickle": copied,
    "the same module in two groups": in_two_groups,
    "a weight of a drop-in module": two_optimizers,
    "parameters in place of modules": parameters,
    "before the model's": loaded_too_early,
    "num_workers=2\\)": read_by_workers,
    "`export_onnx`": exported,
}  # that of several ranks is in tests/optim/test_ranks.py


@pytest.mark.parametrize("code", RAISES)
def test_errors_are_those_of_the_page(code: str) -> None:
    (expected,) = re.findall(rf"^\|.*{code}.*\| `(\w+`: .*) \|$", PAGE, re.MULTILINE)
    with pytest.raises(ConfigError) as caught:
        RAISES[code]()
    last = str(caught.value).rstrip().splitlines()[-1]  # after a traceback where a worker process raised it
    assert f"{caught.type.__name__}`: {last.removeprefix('terarec.errors.ConfigError: ')}" == expected


def test_the_page_lists_no_other_error() -> None:
    assert len(re.findall(r"^\|.*\| `\w+`: .* \|$", PAGE, re.MULTILINE)) == len(RAISES) + 1
