# SPDX-License-Identifier: Apache-2.0
"""What some of upstream's files need besides data: trained models, and names that documentation takes as given."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from tools.upstream_files.cases import Case
    from tools.upstream_files.running import Folder


def prepare(case: Case, folder: Folder) -> list[str]:
    """Write what a case needs besides data; return a line for each thing."""
    if case.path.endswith("dcn_inference.py"):
        file = folder.copy / "test" / "scripts" / "dcn_inference.json"
        _write(folder, file, folder.root / "hugectr")
        return ["a model of dcn_inference.json, trained for 20 iterations, and 64 samples as text"]
    if case.path.endswith(("wdl_multitable_test.py", "movielens_nodense_test.py")):
        script, target = folder.copy / case.path, folder.root / "hugectr" / "scored"
        _write(folder, script, target)
        return ["a model whose first table holds the ten scores that the test expects, and ten samples"]
    if case.path.endswith("mmoe_inference.py"):
        (folder.work / "mmoe_data").symlink_to(folder.work)  # the folder of the data that the model was trained on
    if case.path.endswith("hugectr_criteo.ipynb"):
        shutil.copytree(folder.checkout / "tools" / "criteo_predict", folder.work.parent / "tools" / "criteo_predict")
        _write_log(folder.work / "dcn_data" / "val" / "test.txt")
        return ["a log of 1,024 lines as text"]
    if case.path.startswith("test/inference/hps/"):
        _write_tables(folder.root / "hugectr")
        return ["two tables of 1 and 16 numbers a key, and ten lines of a log"]
    helpers = "sparse_operation_kit/unit_test/test_scripts/tf2/utils.py"
    if "sok_to_hps" in case.path and (folder.checkout / helpers).exists():
        target = folder.root / "hugectr" / helpers
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder.checkout / helpers, target)
    if case.path.startswith("hps_tf/test/"):
        for file in (folder.copy / case.path).parent.glob("create_*.py"):
            shutil.copy(file, folder.work)  # a test starts it in its working directory
    for argument in case.arguments:
        if argument in ("etc_output", "exported/"):
            (folder.work / argument).mkdir(exist_ok=True)
    return []


def _write(folder: Folder, file: Path, target: Path) -> None:
    code, output = folder.call(["-m", "tools.upstream_files.setups", str(file), str(target)])
    if code:
        raise RuntimeError(f"no model for {file.name}: {output.strip().splitlines()[-1:]}")


def _write_log(path: Path) -> None:
    """Write samples as text, as upstream's preparation of Criteo's data does: a label, 13 numbers, 26 keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    columns = (random.integers(0, 2, (1_024, 1)), random.random((1_024, 13)), random.integers(0, 1_000, (1_024, 26)))
    lines = (" ".join(str(value) for part in row for value in part.tolist()) for row in zip(*columns, strict=True))
    path.write_text("\n".join(lines) + "\n")


def _write_tables(folder: Path) -> None:
    """Write two tables of a wide and deep model as upstream's files, and the log that its tests look up."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for number, width in enumerate((1, 16)):
        table = folder / f"wdl{number}_sparse_20.model"
        table.mkdir(exist_ok=True)
        np.arange(100_000, dtype=np.int64).tofile(table / "key")
        random.normal(size=(100_000, width)).astype(np.float32).tofile(table / "emb_vector")
    names = ["C1_C2", "C3_C4", *(f"C{number}" for number in range(1, 27))]
    rows = random.integers(0, 4, (10, len(names)))
    lines = [",".join(names), *(",".join(map(str, row)) for row in rows)]
    (folder / "first_ten.csv").write_text("\n".join(lines) + "\n")


def train_for_inference(description: Path, folder: Path) -> None:
    """Train the model of an inference file of 3.0 and write it, and samples as text, where the file expects them."""
    from tools.upstream_files.probe import input_of

    from terarec import hugectr
    from terarec.apps.synthetic.records import RecordGenerator, generate_records
    from terarec.data.records import NormSource, RecordReader
    from terarec.spec import RecordLayout, SparseInput

    content = json.loads(description.read_text())
    layers = content["layers"]
    data, last = layers[0], layers[-1]
    data["label"].setdefault("top", "label")  # which the files of 3.0 leave out
    (slot,) = input_of(data).data_reader_sparse_param_array
    samples = 64
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "file_list.txt"
    layout = RecordLayout(
        label_dim=1,
        dense_dim=data["dense"]["dense_dim"],
        inputs=(SparseInput(name="data", nnz_per_slot=tuple(slot.nnz_per_slot), is_fixed_length=False),),
        key_bytes=4,
        slot_sizes=(1_000,) * slot.slot_num,
    )
    generate_records(RecordGenerator(kind="norm", layout=layout, is_planted=True), source, rows_per_file=8_192)
    solver = hugectr.CreateSolver(batchsize=256, batchsize_eval=256, vvgpu=[[0]], max_eval_batches=2)
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Norm,
        source=[str(source)],
        eval_source=str(source),
        check_type=hugectr.Check_t.Sum,
    )
    model = hugectr.Model(solver, reader, hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam))
    loss = {"name": "loss", "type": "BinaryCrossEntropyLoss", "bottom": [last["bottom"], "label"], "top": "loss"}
    training = folder / "training.json"
    training.write_text(json.dumps({**content, "layers": [*layers[:-1], loss]}))
    model.construct_from_json(graph_config_file=str(training), include_dense_network=True)
    model.compile()
    model.fit(max_iter=20, display=10, eval_interval=10, snapshot=10_000)
    weights: Any = content["inference"]
    # The file names them by the last iteration, which `shrink` has made 100.
    model.save_params_to_files(weights["dense_model_file"].partition("_dense")[0], 100)
    reading = RecordReader(
        NormSource(source, layout, checksum=True), batch_size=samples, repeat=False, drop_last=False, threads=1
    )
    batch = next(iter(reading))
    reading.close()
    # Keys come slot by slot; the request has them sample by sample.
    slots = slot.slot_num
    offsets, keys = batch.sparse.offsets.tolist(), batch.sparse.keys.tolist()
    bags = [keys[offsets[s * samples + b] : offsets[s * samples + b + 1]] for b in range(samples) for s in range(slots)]
    pointers = np.cumsum([0, *map(len, bags)])
    rows = (
        batch.label[:, 0].int().tolist(),
        batch.dense.flatten().tolist(),
        [key for bag in bags for key in bag],
        pointers,
    )
    (folder / "dcn_csr.txt").write_text("\n".join(" ".join(map(str, row)) for row in rows) + "\n")


def write_scored_model(script: Path, folder: Path) -> None:
    """Write a model whose scores of ten samples are those that a test compares with, and the samples.

    The test has upstream's model and samples, which are not published, elsewhere. Here the first key of each sample
    in the first table has the logit of the sample's score; every other number of the model is 0.
    """
    from terarec import hugectr

    text = script.read_text()
    sizes, scores = (
        [float(one) for one in re.findall(r"[\d.]+", re.search(rf"{name}\s*=\s*\[(.*?)\]", text, re.S).group(1))]
        for name in ("emb_size", "result")
    )
    samples, is_wide = len(scores), "C1_C2" in text
    folder.mkdir(parents=True)
    rows = pd.DataFrame({name: range(samples) for name in _columns(is_wide)})
    (rows.to_csv if is_wide else rows.to_parquet)(folder / "samples", index=False)
    # As the test computes them: column by column within a sample, with the sizes of the columns before.
    firsts = np.cumsum([0, *sizes[:-1]]).astype(np.int64)
    keys = (np.arange(samples)[:, None] + firsts).flatten()
    logits = dict(zip(keys[: 2 * samples : 2].tolist(), np.log(scores) - np.log1p(-np.array(scores)), strict=True))
    for number, width in enumerate((1, 16)[: 1 + is_wide]):
        table = folder / f"table{number}.model"
        table.mkdir()
        np.unique(keys).tofile(table / "key")
        first = [logits.get(key, 0.0) if number == 0 else 0.0 for key in np.unique(keys).tolist()]
        np.repeat(np.array(first, np.float32)[:, None], width, 1).tofile(table / "emb_vector")
    model = hugectr.Model(
        hugectr.CreateSolver(i64_input_key=True),
        hugectr.DataReaderParams(
            data_reader_type=hugectr.DataReaderType_t.Parquet,
            source=["none"],
            eval_source="none",
            check_type=hugectr.Check_t.Non,
        ),
        hugectr.CreateOptimizer(),
    )
    for part in _scored_layers(hugectr, is_wide):
        model.add(part)
    model.graph_to_json(str(folder / "graph.json"))
    np.zeros(430 if is_wide else 3, np.float32).tofile(folder / "dense.model")


def _scored_layers(hugectr: Any, is_wide: bool) -> list[Any]:
    """Return the layers of a model that adds the first table's numbers and one layer of weights."""
    slots = [hugectr.DataReaderSparseParam(f"keys{n}", 1, False, (2, 26)[n]) for n in range(1 + is_wide)]
    kind, layer = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash, hugectr.DenseLayer
    of = hugectr.Layer_t
    return [
        hugectr.Input(1, "label", 13 * is_wide, "dense", slots),
        *(hugectr.SparseEmbedding(kind, 1, (1, 16)[n], "sum", f"table{n}", f"keys{n}") for n in range(1 + is_wide)),
        *(layer(of.Reshape, [f"table{n}"], [f"flat{n}"], leading_dim=(2, 416)[n]) for n in range(1 + is_wide)),
        layer(of.ReduceSum, ["flat0"], ["sum"], axis=1),
        *([layer(of.Concat, ["flat1", "dense"], ["all"])] if is_wide else []),
        layer(of.InnerProduct, ["all" if is_wide else "flat0"], ["fc"], num_output=1),
        layer(of.Add, ["sum", "fc"], ["logit"]),
        layer(of.BinaryCrossEntropyLoss, ["logit", "label"], ["loss"]),
    ]


def _columns(is_wide: bool) -> list[str]:
    if not is_wide:
        return ["userId", "movieId", "rating"]
    pairs = ["C1_C2", "C3_C4"]
    return ["label", *(f"I{one}" for one in range(1, 14)), *(f"C{one}" for one in range(1, 27)), *pairs]


def prelude(folder: Path) -> Path:
    """Write the names that examples of the documentation use without defining them; return the script."""
    path = folder / "prelude.py"
    path.write_text(_PRELUDE)
    return path


_PRELUDE = """
import inspect
import os

from terarec.hugectr.command_line import provide_modules
from terarec.hugectr.schema.table import form_of, forms

provide_modules()
import hps_torch
import hugectr


class Examples:
    # Takes the layers of examples, whose inputs come from layers that the page does not show, and calls of the model.
    def __getattr__(self, name):
        method = getattr(hugectr.Model, name)

        def call(*values, **options):
            if f"Model.{name}" in forms():
                form_of(f"Model.{name}", values, options).read(values, options)
            else:
                inspect.signature(method).bind(self, *values, **options)

        return call


model = Examples()
optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam)
num_blocks, target_hit_rate, max_num_evict = 2, 0.5, 0
train_steps = 2
output_dir = "."
xx = 1
EVAL_SOURCE, SLOT_SIZE_ARRAY = "file_list_test.txt", [100] * 26
"""

if __name__ == "__main__":
    make = train_for_inference if sys.argv[1].endswith(".json") else write_scored_model
    make(Path(sys.argv[1]), Path(sys.argv[2]))
