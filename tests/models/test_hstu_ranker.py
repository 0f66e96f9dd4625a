# SPDX-License-Identifier: Apache-2.0
"""The ranking form of HSTU with actions and times: its formula, what it learns of them, its export and its errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from terarec.batch import Batch, Jagged, feature_ends
from terarec.errors import ConfigError
from terarec.export import export_model
from terarec.export.lookups import exportable
from terarec.export.scoring import BatchScoring
from terarec.models import build_model
from terarec.models.columns import without_keys
from terarec.nn.objectives import BinaryObjective
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    CategoricalColumn,
    DatasetSpec,
    DynamicTablesSpec,
    HSTURankerSpec,
    TargetHistory,
)
from terarec.train.optimizers import Optimizers
from tests.errors import at
from tests.models.every import dataset
from tests.models.test_formulas import check, random_model

NAMES = ("a", "b", "past", "done", "when", "now")
PAIR = (TargetHistory(target="a", history="past"),)
SPEC = HSTURankerSpec(
    width=4,
    sequences=PAIR,
    actions="done",
    times="when",
    time="now",
    time_buckets=12,
    max_length=3,
    hidden=(6,),
)
COLUMNS = replace(
    dataset(dense=1, labels=2),
    categorical=(
        *dataset(categorical=("a", "b", "past")).categorical,
        CategoricalColumn(name="done", rows=3, hotness=4),
        CategoricalColumn(name="when", rows=None, hotness=4),
        CategoricalColumn(name="now", rows=None),
    ),
)


def batch_of(size: int, *, seed: int = 0, others: tuple[str, ...] = NAMES) -> Batch:
    """Histories of up to four items, each with an action and a time before that of its sample."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    lengths = draw(0, 5, size)
    now = draw(10_000, 20_000, size)
    bags: dict[str, list[list[int]]] = {
        "a": [[key] for key in draw(1, 7, size)],
        "b": [[key] for key in draw(0, 7, size)],
        "past": [draw(0, 7, length) for length in lengths],
        "done": [draw(0, 3, length) for length in lengths],
        "when": [sorted(draw(0, 10_000, length)) for length in lengths],
        "now": [[time] for time in now],
    }
    chosen = [bag for name in others for bag in bags[name]]
    return Batch(
        dense=torch.randn(size, 1, generator=generator),
        label=torch.randint(0, 2, (size, 2), generator=generator).float(),
        sparse=Jagged(
            names=others,
            keys=torch.tensor([key for bag in chosen for key in bag]),
            offsets=torch.tensor([0, *map(len, chosen)]).cumsum(0),
        ),
    )


def columns_of(spec: HSTURankerSpec) -> DatasetSpec:
    """The columns that a model reads."""
    read = {"a", "b", "past", spec.actions, spec.times, spec.time}
    return replace(COLUMNS, categorical=tuple(one for one in COLUMNS.categorical if one.name in read))


@pytest.mark.parametrize(
    "changes",
    [{}, {"times": None, "time": None}, {"actions": None}, {"mask_missing": False, "max_length": 2}],
    ids=["all", "actions", "times", "no mask"],
)
def test_it_equals_its_formula(changes: dict[str, Any]) -> None:
    spec = replace(SPEC, **changes)
    columns = columns_of(spec)
    check(spec, columns, batch_of(24, others=tuple(one.name for one in columns.categorical)))


def test_later_items_and_other_samples_change_nothing_of_a_sample() -> None:
    """The length of the history bounds what is read, and samples are apart."""
    model, batch = random_model(SPEC, COLUMNS), batch_of(20)
    batch = replace(batch, dense=batch.dense.double())
    with torch.no_grad():
        whole = model(batch)
        for row in range(20):
            bags = [batch.sparse.offsets[place * 20 + row : place * 20 + row + 2].tolist() for place in range(6)]
            keys = torch.cat([batch.sparse.keys[begin:end] for begin, end in bags])
            offsets = torch.tensor([0, *(end - begin for begin, end in bags)]).cumsum(0)
            sparse = Jagged(names=NAMES, keys=keys, offsets=offsets)
            alone = model(Batch(dense=batch.dense[row : row + 1], label=batch.label[row : row + 1], sparse=sparse))
            torch.testing.assert_close(alone[0], whole[row])


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["static", "dynamic"])
def test_it_learns_what_the_user_did_with_the_target_before(tables: str) -> None:
    """The label is whether the user's action on an earlier occurrence of the target was a 2."""
    spec = replace(SPEC, width=8, hidden=(32,), max_length=4)
    if tables == "dynamic":
        spec = replace(spec, tables=DynamicTablesSpec())
    model = build_model(spec, replace(COLUMNS, labels=COLUMNS.labels[:1]), seed=1)

    def labelled(seed: int, size: int = 256) -> Batch:
        batch = batch_of(size, seed=seed)
        first = batch.sparse.offsets.tolist()
        keys = batch.sparse.keys.tolist()
        label = []
        for row in range(size):
            past, done = (keys[first[at * size + row] : first[at * size + row + 1]] for at in (2, 3))
            label.append(float((keys[row], 2) in set(zip(past, done, strict=True))))
        return replace(batch, label=torch.tensor(label)[:, None])

    optimizers = Optimizers.of(model, AdamSpec(lr=0.01), AdaGradSpec(lr=0.1))
    torch.manual_seed(0)
    for step in range(250):
        batch = labelled(step)
        optimizers.zero_grad()
        BinaryObjective().loss(model(batch), batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    batch = labelled(-1, 2000)
    with torch.no_grad():
        right = ((model.eval()(batch) > 0).float() == batch.label).float().mean().item()
    assert batch.label.mean() < 0.25
    assert right > 0.95


ACTIONS = replace(SPEC, times=None, time=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "format", "tables"), [(ACTIONS, "torch", False), (SPEC, "torch", True), (SPEC, "onnx", True)]
)
def test_a_model_with_lists_beside_the_history_is_exported(
    tmp_path: Path,
    spec: HSTURankerSpec,
    format: str,  # noqa: A002
    tables: bool,
) -> None:
    """It was not. The file is compared with the model."""
    columns = columns_of(spec)
    model = random_model(spec, columns).float()
    report = export_model(model, tmp_path / "out", dataset=columns, format=format, tables=tables)
    assert report.max_abs_difference < 1e-5


@pytest.mark.parametrize("spec", [ACTIONS, SPEC], ids=["actions", "all"])
def test_padded_lists_belong_to_the_items_at_their_places(spec: HSTURankerSpec) -> None:
    """The lists of a program have paddings of their own."""
    columns = columns_of(spec)
    batch = batch_of(9, others=tuple(one.name for one in columns.categorical))
    model = random_model(spec, columns).float()
    scoring = BatchScoring(model, columns, tables=True, key_inputs=(), scores=torch.sigmoid)
    inputs = {one.name: torch.from_numpy(one.read(batch)) for one in scoring.inputs}
    # What is behind the longest list of items does not count.
    inputs["done"] = torch.nn.functional.pad(inputs["done"], (0, 2), value=1)
    with exportable(model, tables=True), torch.no_grad():
        scores = torch.cat(scoring(*inputs.values()), dim=1)
    with torch.no_grad():
        torch.testing.assert_close(scores, model(batch).sigmoid(), atol=1e-5, rtol=1e-5)


def test_a_model_with_times_has_no_file_without_tables() -> None:
    model, batch = random_model(SPEC, COLUMNS).float(), batch_of(9)
    scoring = BatchScoring(model, COLUMNS, tables=False, key_inputs=(), scores=torch.sigmoid)
    inputs = [torch.from_numpy(one.read(batch)) for one in scoring.inputs]
    with (
        exportable(model, tables=False),
        pytest.raises(ConfigError, check=at("hstu_ranker", "reads the times 'when', which are rows of no table")),
    ):
        scoring(*inputs)


def without_last(batch: Batch, name: str, moved: bool = False) -> Batch:
    """A key less in the last bag of a feature that has one; with `moved` the bag before has it."""
    jagged, size = batch.sparse, batch.batch_size
    first = jagged.names.index(name) * size
    row = int(jagged.offsets[first : first + size + 1].diff().nonzero()[-1])
    place = int(jagged.offsets[first + row + 1])
    if moved:
        offsets = jagged.offsets.clone()
        offsets[first + row] += 1
        return replace(batch, sparse=replace(jagged, offsets=offsets))
    keys = torch.cat([jagged.keys[: place - 1], jagged.keys[place:]])
    offsets = jagged.offsets - (torch.arange(len(jagged.offsets)) > first + row).long()
    return replace(batch, sparse=Jagged(names=jagged.names, keys=keys, offsets=offsets))


@pytest.mark.parametrize(
    ("name", "moved", "problem"),
    [
        ("done", False, "items of 'past', expected as many"),
        ("when", True, "items of 'past', expected as many"),
        ("now", False, "row 19: got 0 keys, expected one"),
        ("now", True, "row 18: got 2 keys, expected one"),
    ],
)
def test_lists_of_other_lengths_are_rejected(name: str, moved: bool, problem: str) -> None:
    model = build_model(SPEC, COLUMNS)
    with pytest.raises(ConfigError) as error:
        model(without_last(batch_of(20), name, moved))
    assert problem in str(error.value)
    assert f"column '{name}', row" in str(error.value)


def test_lists_beside_the_history_are_checked_with_one_answer_for_the_host() -> None:
    """Which waits for a device each time."""
    jagged = batch_of(20).sparse
    jagged = replace(jagged, ends=feature_ends(jagged))
    with HostReads() as reads:
        without_keys(jagged, {"past": 0}, {"past": ("done", "when")})
    assert reads.count == 1


class HostReads(TorchDispatchMode):
    """Counts the numbers of tensors that the host reads."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"actions": "nothing"}, "actions: data set 'small' has no categorical column 'nothing'"),
        ({"actions": None, "times": "done"}, "times: 'done' has 3 ids"),
        ({"time": "b"}, "time: 'b' has 7 ids"),
    ],
)
def test_columns_that_are_not_there_are_rejected(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, check=at("hstu_ranker", problem)):
        build_model(replace(SPEC, **changes), COLUMNS)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"times": None}, "time"),
        ({"actions": "past"}, "sequences"),
        ({"heads": 3}, "width"),
        ({"sequences": (*PAIR, TargetHistory(target="b", history="tags"))}, "sequences"),
    ],
)
def test_a_wrong_spec_is_rejected(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, check=at(f"HSTURankerSpec.{field}")):
        replace(SPEC, **changes)
