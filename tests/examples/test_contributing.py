# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md shows what each kind of addition costs: at most three files, and they work as shown."""

from pathlib import Path

import pytest

from tests.examples.worked import edited_package, edits, run
from tests.params import in_every_run

LAYER = """
import torch
from terarec.models import GraphModel
from terarec.nn import LAYERS, TensorShape, build_layer
from terarec.spec import GraphLabel, GraphLayer, GraphSpec

layer = build_layer("swish", [TensorShape(1, (3,))], {"beta": 2.0}, generator=torch.Generator())
x = torch.tensor([[-1.0, 0.0, 2.0]], dtype=torch.float64, requires_grad=True)
assert torch.allclose(layer(x), x / (1 + torch.exp(-2.0 * x)))
assert torch.autograd.gradcheck(layer, x)
assert [option.name for option in LAYERS["swish"].options] == ["beta"]

spec = GraphSpec(
    labels=(GraphLabel(name="label"),),
    dense_name="dense",
    dense_dim=3,
    layers=(
        GraphLayer(kind="swish", bottoms=("dense",), tops=("hidden",)),
        GraphLayer(kind="inner_product", bottoms=("hidden",), tops=("logit",), options={"num_output": 1}),
        GraphLayer(kind="binary_cross_entropy", bottoms=("logit", "label"), tops=("loss",)),
    ),
)
assert GraphModel(spec).shapes["hidden"] == TensorShape(1, (3,))
"""

MODEL = """
import torch
from terarec.batch import Batch, Jagged
from terarec.models import build_model
from terarec.spec import AdaGradSpec, AdamSpec, CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, RunSpec
from terarec.spec import TrainingSpec, from_data, to_data
from terarec.train import Optimizers, Trainer

run = from_data(RunSpec, {"data": "DATA", "model": {"kind": "nfm", "width": 4, "hidden": [8]}})
assert to_data(run)["model"]["kind"] == "nfm"
dataset = DatasetSpec(
    name="clicks",
    storage="parquet",
    labels=(LabelColumn(name="click"),),
    dense=(DenseColumn(name="age"),),
    categorical=(CategoricalColumn(name="user", rows=6), CategoricalColumn(name="item", rows=6)),
)
generator = torch.Generator().manual_seed(0)
keys = torch.randint(6, (2, 64), generator=generator)
batch = Batch(
    dense=torch.rand(64, 1, generator=generator),
    label=((keys[0] + keys[1]) % 2).float()[:, None],
    sparse=Jagged(names=("user", "item"), keys=keys.flatten(), offsets=torch.arange(129)),
)
model = build_model(run.model, dataset)
assert model(batch).shape == (64, 1)
trainer = Trainer(model, TrainingSpec(), Optimizers.of(model, AdamSpec(lr=0.01), AdaGradSpec(lr=0.1)))
first = float(trainer.train_step(batch))
for _ in range(200):
    last = float(trainer.train_step(batch))
assert last < first / 2, (first, last)
"""

METRIC = """
import math
import numpy as np
from terarec.metrics import MetricSet, find_metric

assert not find_metric("log_cosh").higher_is_better
scores, labels = np.array([0.5, 2.0, -1.0, 0.0]), np.array([1.0, 2.0, 3.0, np.nan])
errors = [math.log(math.cosh(p - y)) for p, y in zip(scores[:3], labels[:3])]
for slices in ((), ("country",)):
    metrics = MetricSet(["log_cosh"], ["value"], slices=slices)
    metrics.update(scores=scores, labels=labels, columns={"country": np.array([1, 1, 2, 2])})
    found = metrics.compute()
    assert math.isclose(found["log_cosh"], sum(errors) / 3, rel_tol=1e-6)
of_first = found.slices["country"].values[0].metrics.values["log_cosh"]
assert math.isclose(of_first, sum(errors[:2]) / 2, rel_tol=1e-6)
"""

OPERATOR = """
import json
from pathlib import Path
import numpy as np
from terarec.etl import prepare
from terarec.etl.ops import Power
from terarec.etl.workflow import Workflow
from terarec.spec import LabelSpec, PrepareOptions, SourceColumn, SourceSpec, WorkflowSpec, from_data, to_data
from terarec.data import Reader

logs = Path(ROOT) / "logs.csv"
logs.write_text("click,price\\n1,9\\n0,-16\\n1,0\\n")
columns = (SourceColumn(name="click", type="integer"), SourceColumn(name="price", type="number"))
workflow = WorkflowSpec(
    name="shop",
    source=SourceSpec(format="delimited", delimiter=",", header=True, columns=columns),
    steps=(from_data(Power, {"columns": ["price"]}),),
    labels=(LabelSpec(name="click"),),
    dense=("price",),
)
data = json.loads(json.dumps(to_data(workflow)))
assert data["steps"][0]["kind"] == "power", data
fitted = Workflow.of(from_data(WorkflowSpec, data))
prepare(fitted, [logs], Path(ROOT) / "data", PrepareOptions())
(batch,) = Reader(Path(ROOT) / "data", split="train", batch_size=3, drop_last=False)
assert batch.dense[:, 0].tolist()[:2] == [3.0, -4.0]
"""

OPTIMIZER = """
import logging
import numpy as np
import torch
from terarec.batch import Jagged
from terarec.embedding import EmbeddingCollection
from terarec.optim import RowOptimizer
from terarec.spec import FeatureSpec, RowOptions, RunSpec, TableSpec, from_data, to_data
from terarec.spec.optimizer import LionSpec

logging.basicConfig(format="LOG %(message)s")
run = from_data(RunSpec, {"data": "DATA", "model": {"kind": "lr"}, "sparse_optimizer": {"kind": "lion", "lr": 0.5}})
assert run.sparse_optimizer == LionSpec(lr=0.5)
assert to_data(run)["sparse_optimizer"]["kind"] == "lion"

def trained(mode, dtype="float32"):
    table = TableSpec(name="user", rows=3, width=2, dtype=dtype)
    tables = EmbeddingCollection([table], [FeatureSpec(name="user", table="user")])
    before = tables.table("user").detach().double().numpy().copy()
    optimizer = RowOptimizer(tables, LionSpec(lr=0.5, beta1=0.5, beta2=0.75, rows=RowOptions(mode=mode)))
    for keys in ([0, 1, 1], [0], [2], [0, 1, 2]):
        jagged = Jagged(names=("user",), keys=torch.tensor(keys), offsets=torch.arange(len(keys) + 1))
        (tables(jagged).pooled * torch.tensor([1.0, -2.0])).sum().backward()
        optimizer.step()
    return before, tables.table("user").detach().double().numpy()

rows, found = trained("local")
momentum = np.zeros((3, 2))
for keys in ([0, 1, 1], [0], [2], [0, 1, 2]):
    for row in set(keys):
        gradient = keys.count(row) * np.array([1.0, -2.0])
        rows[row] -= 0.5 * np.sign(0.5 * momentum[row] + 0.5 * gradient)
        momentum[row] = 0.75 * momentum[row] + 0.25 * gradient
assert np.allclose(found, rows, atol=1e-6), (found, rows)
assert np.allclose(trained("lazy_global")[1], trained("global")[1], atol=1e-6)
assert np.allclose(trained("local", "bfloat16")[1], rows, atol=0.1)
"""

FORMAT = """
from pathlib import Path
from terarec.cli import main
from terarec.data import Reader
from terarec.errors import FormatError

logs = Path(ROOT) / "logs"
assert main(["generate", "criteo", "--rows", "2000", "--out", str(logs)]) == 0
for storage in ("arrow", "parquet"):
    options = ["--out", str(Path(ROOT) / storage), "--format", storage, "--rows-per-shard", "500"]
    assert main(["prepare", "criteo", str(logs), *options]) == 0
shards = sorted((Path(ROOT) / "arrow" / "train").iterdir())
assert shards[0].name == "part-00000.arrow" and len(shards) > 1, shards
readers = [Reader(Path(ROOT) / name, split="train", batch_size=64, shuffle=True) for name in ("arrow", "parquet")]
batches = [list(reader) for reader in readers]
assert len(batches[0]) == len(batches[1])
for one, other in zip(*batches):
    assert one.label.equal(other.label) and one.dense.equal(other.dense)
    assert one.sparse.keys.equal(other.sparse.keys) and one.sparse.offsets.equal(other.sparse.offsets)
shards[0].write_bytes(shards[0].read_bytes()[:-100])
try:
    list(Reader(Path(ROOT) / "arrow", split="train", batch_size=64))
except FormatError as error:
    assert "cannot be read as Arrow" in str(error), error
else:
    raise AssertionError("a file that is cut short was read")
"""

STORAGE = """
import pytest
from terarec.memory import RowStore
from terarec.storage.sqlite_store import SQLiteStore
from tests.memory import row_stores

def reopen(store: RowStore, directory):
    store.close()
    return SQLiteStore(directory)

row_stores.KINDS.clear()
row_stores.KINDS["sqlite"] = row_stores.Kind(create=SQLiteStore, reopen=reopen, load=SQLiteStore)
suite = row_stores.__file__.replace("row_stores.py", "test_row_store.py")
assert pytest.main(["-q", "-p", "no:cacheprovider", suite, "-k", "sqlite"]) == 0
"""

PARAMETER = """
import pytest
from terarec import hugectr
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.optimizer import optimizer_rule
from terarec.spec import RMSPropSpec
from tests.hugectr.generate import page, stub

kind = hugectr.Optimizer_t.RMSProp
for params, decay in ((hugectr.CreateOptimizer(kind, rho=0.5), 0.5), (hugectr.CreateOptimizer(kind), 0.9)):
    assert optimizer_rule(params, 0.1) == RMSPropSpec(lr=0.1, decay=decay, eps=1e-7)
with pytest.raises(WrongInputError) as caught:
    hugectr.CreateOptimizer(kind, rho=1.0)
assert caught.value.field == "rho"
assert "rho: float" in stub() and "| `rho` |" in page()
"""

DEPRECATION = """
import pytest
from terarec import ragged

with pytest.warns(DeprecationWarning, match="expected terarec.ragged.Ragged"):
    assert ragged.RaggedLists is ragged.Ragged
with pytest.raises(AttributeError, match="no attribute 'RaggedList'"):
    ragged.RaggedList
"""


EXAMPLES = [
    ("A dense layer", LAYER),
    ("A model", MODEL),
    ("A workflow operator", OPERATOR),
    ("A metric", METRIC),
    ("An optimizer for tables", OPTIMIZER),
    ("A storage", STORAGE),
    ("A file format", FORMAT),
    ("Add a HugeCTR parameter", PARAMETER),
    ("Deprecate a name", DEPRECATION),
]
FAST = {("A metric", METRIC), ("Deprecate a name", DEPRECATION)}
"""Those that load a part of the package; each of the others takes two seconds."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "script"), in_every_run(FAST, EXAMPLES), ids=lambda text: "" if "\n" in text else text
)
def test_a_worked_example_works(section: str, script: str, tmp_path: Path) -> None:
    run(edited_package(section, tmp_path), script)


@pytest.mark.parametrize("section", [section for section, _ in EXAMPLES])
def test_a_worked_example_takes_three_files_at_most(section: str) -> None:
    assert 1 <= len({file for file, _, _ in edits(section)}) <= 3
