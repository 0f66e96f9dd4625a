# SPDX-License-Identifier: Apache-2.0
"""docs/embedding.md keeps its word: its Python runs, block after block."""

import re
from pathlib import Path

import pytest
import torch

import terarec
from terarec.batch import Jagged, one_hot
from terarec.embedding import EmbeddingCollection
from terarec.errors import TerarecError
from terarec.spec import DynamicTableSpec, FeatureSpec, TableSpec

PAGE = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()


def test_the_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 1
    names = {}
    for block in blocks:
        exec(compile(block, "embedding.md", "exec"), names)


def looked_up(offsets=(0, 1, 2), keys=(1, 2), **table):
    """A lookup of one feature in a table of 50 rows."""
    tables = [TableSpec(name="city", **{"rows": 50, "width": 16, **table})]
    collection = EmbeddingCollection(tables, [FeatureSpec(name="home", table="city")])
    collection(Jagged(names=("home",), keys=torch.tensor(keys), offsets=torch.tensor(offsets)))


def looked_up_in_a_full_table():
    tables = [DynamicTableSpec(name="user", width=16, max_rows=3)]
    collection = EmbeddingCollection(tables, [FeatureSpec(name="who", table="user")])
    for keys in ([1, 2, 3], [4, 5]):
        collection(one_hot(["who"], torch.tensor([keys])))


def looked_up_elsewhere():
    terarec.EmbeddingBag(50, 16)(torch.zeros(2, 3, dtype=torch.int64, device="meta"))


REJECTED = {
    "negative or too large": lambda: looked_up(keys=(1, 50)),
    "offsets that fall": lambda: looked_up(offsets=(0, 2, 1)),
    "keys, offsets or weights": lambda: Jagged(
        names=("home",), keys=torch.zeros(1, dtype=torch.int32), offsets=torch.arange(2)
    ),
    "several devices": looked_up_elsewhere,
    "to an op or a drop-in": lambda: terarec.EmbeddingBag(50, 16, dtype=torch.float64)(torch.zeros(1, 1).long()),
    "memory for tables": lambda: EmbeddingCollection(
        [TableSpec(name="item", rows=10**12, width=16)], [FeatureSpec(name="f", table="item")]
    ),
    "memory for a dynamic table": looked_up_in_a_full_table,
}


@pytest.mark.parametrize("what", REJECTED)
def test_errors_are_worded_as_the_page_has_them(what):
    (documented,) = re.findall(rf"^\|.*{what}.*\| `(\w+`: .*) \|$", PAGE, re.MULTILINE)
    with pytest.raises(TerarecError) as caught:
        REJECTED[what]()
    message = re.sub(r"[\d,]+ available", "23,155,589,120 available", str(caught.value))
    assert f"{caught.type.__name__}`: {message.replace('meta', 'cuda:0')}" == documented
