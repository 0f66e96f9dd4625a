# SPDX-License-Identifier: Apache-2.0
"""Estimates before a run against what the run then takes."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch

from terarec.config import save_run
from terarec.errors import ConfigError, StorageError
from terarec.formats import read_dataset, write_dataset
from terarec.formats.block import ColumnBlock
from terarec.formats.parts import write_parts
from terarec.models.artifact import tables
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    CategoricalColumn,
    DatasetSpec,
    DeepFMSpec,
    DenseColumn,
    DLRMSpec,
    DynamicTablesSpec,
    FTRLSpec,
    LabelColumn,
    RunSpec,
    StaticTablesSpec,
    Tiers,
    TrainingSpec,
)
from terarec.train import build
from terarec.train.plan import plan_run
from tests.errors import at
from tests.formats.samples import write_split
from tests.params import in_every_run
from tests.processes import run_python
from tests.train.test_tiers import with_tiers


def close(estimate: int, measured: int) -> bool:
    return abs(estimate - measured) <= 0.1 * measured


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """Data of 20,000 samples with three columns of 10,000 ids, in two parts with keysets."""
    directory = tmp_path_factory.mktemp("keyed")
    spec = DatasetSpec(
        name="wide",
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=(DenseColumn(name="I1"),),
        categorical=tuple(CategoricalColumn(name=name, rows=10_000) for name in "abc"),
    )
    random = np.random.default_rng(1)
    block = ColumnBlock(
        label=random.integers(0, 2, (20_000, 1)).astype(np.float32),
        dense=random.random((20_000, 1), dtype=np.float32),
        keys=tuple(random.integers(0, 10_000, 20_000) for _ in "abc"),
    )
    write_split(directory, spec, block, cuts=(10_000,), rows_per_group=5_000)
    write_parts(read_dataset(directory), directory, "train", 2)
    return directory


def run_spec(directory, optimizer, table_spec):
    return RunSpec(
        data=str(directory),
        model=DLRMSpec(width=64, bottom=(8, 64), top=(8,), tables=table_spec),
        sparse_optimizer=optimizer,
        training=TrainingSpec(batch_size=2048, device="cpu", eval_split=None),
    )


@pytest.mark.parametrize("optimizer", [AdaGradSpec(), AdamSpec(), FTRLSpec()], ids=lambda spec: spec.kind)
@pytest.mark.parametrize("kind", ["static", "dynamic", "tiers"])
def test_tables_take_what_was_estimated(tmp_path, keyed, kind, optimizer):
    spec = run_spec(keyed, optimizer, DynamicTablesSpec() if kind == "dynamic" else StaticTablesSpec())
    if kind == "tiers":
        spec = with_tiers(spec, Tiers(host="6MiB", file=str(tmp_path / "rows")))
    found = plan_run(spec)
    run = build(spec, tmp_path / "run")
    run.fit()
    stores = tables(run.model)
    assert [table.name for table in found.tables] == list(stores)
    if kind == "tiers":
        assert all(table.resident_share < 1 for table in found.tables)
        # Indexes of files are estimated by their bound.
        planned = sum(table.host_bytes - table.index_bytes for table in found.tables)
        arenas = {id(store.arena): store.arena for store in stores.values()}.values()
        memory = [arena.data for arena in arenas]
        held = sum(data.memory_bytes - data.tiers.memory.below.memory_bytes for data in memory)
        assert close(planned, held)
        return
    assert close(sum(table.host_bytes for table in found.tables), sum(store.memory_bytes for store in stores.values()))
    for table in found.tables:
        assert close(table.host_bytes, stores[table.name].memory_bytes), table
        assert table.rows == len(stores[table.name])
        assert table.rows_from == ("table" if kind == "static" else "keysets")


@pytest.mark.parametrize(("kib", "partial"), in_every_run([(1600, 1)], [(700, 2), (1600, 1), (4000, 0)]))
def test_each_table_is_placed_by_itself(tmp_path, kib, partial):
    rows = {"large": 4_000, "middle": 1_000, "small": 100}
    dataset = DatasetSpec(
        name="uneven",
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=(DenseColumn(name="I1"),),
        categorical=tuple(CategoricalColumn(name=name, rows=count) for name, count in rows.items()),
    )
    random = np.random.default_rng(1)
    block = ColumnBlock(
        label=random.integers(0, 2, (16_000, 1)).astype(np.float32),
        dense=random.random((16_000, 1), dtype=np.float32),
        keys=tuple(random.integers(0, count, 16_000) for count in rows.values()),
    )
    write_split(tmp_path / "data", dataset, block, cuts=(), rows_per_group=16_000)
    spec = RunSpec(
        data=str(tmp_path / "data"),
        model=DeepFMSpec(width=32, hidden=(8,)),  # tables of 32 numbers a row, and of one
        sparse_optimizer=AdamSpec(),
        training=TrainingSpec(batch_size=128, device="cpu", eval_split=None),
    )
    spec = with_tiers(spec, Tiers(host=f"{kib}KiB", file=str(tmp_path / "rows")))
    found = {table.name: table for table in plan_run(spec).tables}
    run = build(spec, tmp_path / "run")
    run.fit()
    stores = tables(run.model)
    arenas = {id(store.arena): store.arena for store in stores.values()}.values()
    assert len(arenas) == 2
    for arena in arenas:
        mine = [found[name] for name in arena.table_names]
        planned = sum(table.host_bytes - table.index_bytes for table in mine)
        assert close(planned, arena.data.memory_bytes - arena.data.tiers.memory.below.memory_bytes)
        slots = arena.data.tiers.memory.slots
        held = slots.owners.tables[: slots.used_slots].bincount(minlength=3).tolist()
        for table, count in zip(mine, held, strict=True):
            if table.resident_share == 1:
                assert close(table.rows, count)
        if mine[0].width == 32:
            assert [table.resident_share < 1 for table in mine] == [number < partial for number in range(3)]


def test_nothing_is_allocated_for_a_plan(keyed):
    spec = run_spec(keyed, AdaGradSpec(), StaticTablesSpec())
    huge = tuple(dataclasses.replace(column, rows=10**12) for column in read_dataset(keyed).categorical)
    other = dataclasses.replace(read_dataset(keyed), categorical=huge)
    directory = keyed.parent / "huge"
    directory.mkdir()
    (directory / "train").symlink_to(keyed / "train")
    write_dataset(other, directory)
    spec = dataclasses.replace(spec, data=str(directory))
    found = plan_run(spec)
    assert found.host_bytes > 3 * 10**12 * 64 * 8
    assert found.is_over
    with pytest.raises(StorageError, check=at("memory")):
        found.check()
    with pytest.raises(StorageError):
        build(spec, directory.parent / "run").fit()
    fitting = plan_run(with_tiers(spec, Tiers(host="64MiB", file="rows")), host_bytes=found.program_bytes + (1 << 30))
    assert not fitting.is_over
    assert fitting.suggestion is None


@pytest.mark.parametrize("device", [None, torch.device("cuda")], ids=str)
def test_a_suggestion_fits_in_both_memories(keyed, tmp_path, device):
    # Of many rows, as buffers of files take more than small tables. Nothing reads the samples.
    columns = tuple(CategoricalColumn(name=name, rows=300_000) for name in "abc")
    write_dataset(dataclasses.replace(read_dataset(keyed), categorical=columns), tmp_path)
    spec = run_spec(tmp_path, AdamSpec(), StaticTablesSpec())
    rows = 3 * 300_000 * (3 * 4 * 64 + 60)
    # The peak of this process may rise between two plans.
    plan = functools.partial(plan_run, device=device, rows=dict.fromkeys("abc", 300_000), program_bytes=1 << 29)
    whole = plan(spec)
    assert (whole.is_over, whole.placement, whole.available_device_bytes) == (False, (), None)
    if device is None:
        bounds = {"host_bytes": whole.host_bytes - rows // 2}
    else:
        bounds = {"host_bytes": whole.host_bytes + rows // 2, "device_bytes": whole.device_bytes - rows // 2}
    found = plan(spec, **bounds)
    assert found.is_over
    with pytest.raises(StorageError, check=at("memory", "host memory" if device is None else "device memory")):
        found.check()
    fitting = plan(with_tiers(spec, Tiers.parse(found.suggestion)), **bounds)
    assert not fitting.is_over
    fitting.check()
    assert fitting.tables == found.placement
    assert 0.3 < fitting.tables[0].resident_share < 0.7
    least = dict.fromkeys(bounds, whole.program_bytes)
    assert plan(spec, **least).suggestion is None


def test_expected_rows_are_those_of_a_table(keyed):
    spec = run_spec(keyed, AdaGradSpec(), DynamicTablesSpec())
    assert plan_run(spec, rows={"a": 77}).tables[0].rows == 77
    assert plan_run(spec, reads_keysets=False).tables[0].rows_from == "column"
    with pytest.raises(ConfigError, check=at("rows")):
        plan_run(spec, rows={"d": 77})


MEASURED = """
import json, sys
from terarec.kernels import memory
from terarec.config import load_run
from terarec.train import Callback, build
from terarec.train.plan import plan_run
from terarec.train.rehearsal import program_bytes

class Peak(Callback):
    before = 0
    def on_step(self, trainer):  # before the end of the epoch, which saves
        self.before = memory.peak_bytes()

spec = load_run(sys.argv[1])
rows = {} if sys.argv[2] == "static" else dict.fromkeys("abc", int(sys.argv[3]))
found = plan_run(spec, rows=rows, program_bytes=program_bytes())
peak = Peak()
build(spec, sys.argv[4], callbacks=[peak]).fit()
print(json.dumps({
    "without": [found.host_bytes - found.checkpoint_bytes, peak.before],
    "with": [found.host_bytes, memory.peak_bytes()],
}))
"""

CASES = [(kind, rows) for kind in ("static", "dynamic", "tiers") for rows in (60_000, 250_000)]


@pytest.mark.parametrize(("kind", "rows"), in_every_run([("dynamic", 60_000)], CASES))
def test_the_plan_is_within_a_tenth_of_the_peak_of_the_process(tmp_path, kind, rows):
    """Finding L7: the peak without a checkpoint, and with one."""
    dataset = DatasetSpec(
        name="wide",
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=(DenseColumn(name="I1"),),
        categorical=tuple(CategoricalColumn(name=name, rows=rows) for name in "abc"),
    )
    random = np.random.default_rng(1)
    block = ColumnBlock(
        label=random.integers(0, 2, (rows, 1)).astype(np.float32),
        dense=random.random((rows, 1), dtype=np.float32),
        keys=tuple(random.permutation(rows) for _ in "abc"),  # each key once: all rows are trained
    )
    write_split(tmp_path / "data", dataset, block, cuts=(), rows_per_group=16_384)
    spec = run_spec(tmp_path / "data", AdaGradSpec(), DynamicTablesSpec() if kind == "dynamic" else StaticTablesSpec())
    if kind == "tiers":
        spec = with_tiers(spec, Tiers(host="24MiB", file=str(tmp_path / "rows")))
    save_run(spec, tmp_path / "run.json")
    ended = run_python(MEASURED, tmp_path / "run.json", kind, rows, tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    moments = json.loads(ended.stdout.splitlines()[-1])
    in_mib = {moment: [num_bytes >> 20 for num_bytes in pair] for moment, pair in moments.items()}
    assert all(close(*pair) for pair in moments.values()), in_mib
