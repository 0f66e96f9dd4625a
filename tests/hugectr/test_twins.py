# SPDX-License-Identifier: Apache-2.0
"""The same model by the facade's calls, from JSON and described natively: one loss curve, bit for bit."""

import itertools

import torch

import terarec.hugectr as hugectr
from terarec.data.records import NormSource, RecordReader
from terarec.models import GraphModel
from terarec.optim import RowOptimizer, build_dense_optimizer
from terarec.spec import (
    AdamSpec,
    DynamicTableSpec,
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphSpec,
    RecordLayout,
    RowOptions,
    SparseInput,
)
from tests.hugectr import families
from tests.hugectr.planted import Planted, layout, write_norm
from tests.hugectr.scripts import ADAM, dcn, norm_reader, solver
from tests.hugectr.test_model import losses_of
from tests.processes import run_python

STEPS = 45  # more than an epoch
FROM_NORMAL = {"weight_init": "default", "bias_init": "default"}


def embedding(name, width, columns, *, is_split=False):
    """Dynamic tables as hash embeddings have them: one for all columns, or one for each."""
    tables = [f"{name}.{slot}" for slot in range(len(columns))] if is_split else [name]
    return GraphEmbedding(
        name=name,
        tables=tuple(DynamicTableSpec(name=table, width=width, init_scale=0.05) for table in tables),
        features=tuple(
            GraphFeature(name=column, table=tables[slot % len(tables)]) for slot, column in enumerate(columns)
        ),
    )


def slots(name, count):
    return [f"{name}.{slot}" for slot in range(count)]


def layers(*rows):
    return tuple(
        GraphLayer(kind=kind, bottoms=tuple(bottoms.split()), tops=tuple(tops.split()), options=options)
        for kind, bottoms, tops, options in rows
    )


def linear(bottom, top, width):
    return "inner_product", bottom, top, {"num_output": width, **FROM_NORMAL}


def native_dcn():
    return GraphSpec(
        labels=(GraphLabel(name="label"),),
        dense_dim=3,
        embeddings=(embedding("embedding", 8, slots("data", 4)),),
        layers=layers(
            ("reshape", "embedding", "flat", {"leading_dim": 32}),
            ("concat", "flat dense", "all", {"axis": 1}),
            ("multi_cross", "all", "cross", {"num_layers": 2}),
            linear("all", "hidden", 32),
            ("relu", "hidden", "active", {}),
            ("dropout", "active", "dropped", {"rate": 0.1}),
            ("concat", "cross dropped", "both", {"axis": 1}),
            linear("both", "logit", 1),
            ("binary_cross_entropy", "logit label", "loss", {}),
        ),
    )


def native_wide_deep():
    return GraphSpec(
        labels=(GraphLabel(name="label"),),
        dense_dim=3,
        embeddings=(embedding("wide", 1, slots("wide_data", 1)), embedding("deep", 8, slots("deep_data", 3))),
        layers=layers(
            ("reshape", "deep", "flat", {"leading_dim": 24}),
            ("reshape", "wide", "wide_flat", {"leading_dim": 1}),
            ("reduce_sum", "wide_flat", "wide_sum", {"axis": 1}),
            ("concat", "flat dense", "all", {"axis": 1}),
            linear("all", "hidden", 32),
            ("relu", "hidden", "active", {}),
            ("dropout", "active", "dropped", {"rate": 0.1}),
            linear("dropped", "deep_logit", 1),
            ("add", "deep_logit wide_sum", "sum", {}),
            ("binary_cross_entropy", "sum label", "loss", {}),
        ),
    )


def native_mmoe():
    experts = [linear("all", f"hidden{number}", 16) for number in range(2)]
    active = [("relu", f"hidden{number}", f"expert{number}", {}) for number in range(2)]
    rows = [row for pair in zip(experts, active, strict=True) for row in pair]
    for task in ("first", "second"):
        rows.append(linear("all", f"{task}_gate", 2))
        rows.append(("softmax", f"{task}_gate", f"{task}_shares", {}))
        rows.append(("slice", f"{task}_shares", f"{task}_0 {task}_1", {"ranges": ((0, 1), (1, 2))}))
        for number in range(2):
            rows.append(("scale", f"{task}_{number}", f"{task}_wide{number}", {"axis": 0, "factor": 16}))
            rows.append(("elementwise_multiply", f"expert{number} {task}_wide{number}", f"{task}_part{number}", {}))
        rows.append(("add", f"{task}_part0 {task}_part1", f"{task}_mix", {}))
        rows.append(linear(f"{task}_mix", f"{task}_logit", 1))
    rows += [("binary_cross_entropy", f"{task}_logit {task}", f"{task}_loss", {}) for task in ("first", "second")]
    return GraphSpec(
        labels=tuple(GraphLabel(name=task, weight=0.5) for task in ("first", "second")),
        dense_dim=3,
        embeddings=(embedding("embedding", 8, slots("data", 4), is_split=True),),
        layers=layers(
            ("reshape", "embedding", "flat", {"leading_dim": 32}), ("concat", "flat dense", "all", {"axis": 1}), *rows
        ),
    )


def native_losses(spec, source, of_file):
    """The curve of a plain loop, with a row optimizer for each embedding."""
    adam = {"lr": 0.01, "eps": 1e-7, "eps_hat": True}
    torch.manual_seed(5)
    model = GraphModel(spec, seed=5)
    of_rows = AdamSpec(**adam, rows=RowOptions(mode="global"))
    optimizers = [RowOptimizer(collection, of_rows) for collection in model.embeddings.values()]
    optimizers.append(build_dense_optimizer(AdamSpec(**adam), model.layers.parameters()))
    records = NormSource(source, of_file, checksum=True)
    reader = RecordReader(records, batch_size=500, repeat=True, drop_last=True, threads=1)
    found = []
    for batch in itertools.islice(reader, STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(float(loss.detach()))
    reader.close()
    return found


def losses_from_json(made, path, sources, *loss_weights):
    """The curve of the model that the file of `made` describes."""
    made.graph_to_json(str(path))
    twin = hugectr.Model(solver(), norm_reader(*sources), hugectr.CreateOptimizer(**ADAM))
    twin.construct_from_json(str(path), True)
    twin.compile(*loss_weights)
    return losses_of(twin, STEPS)


def inputs(*names_and_slots):
    return tuple(
        SparseInput(name=name, nnz_per_slot=(1,) * count, is_fixed_length=True) for name, count in names_and_slots
    )


def test_dcn(planted, tmp_path):
    made = dcn(*planted[:2])
    curve = losses_of(made, STEPS)
    assert curve == native_losses(native_dcn(), planted[0], layout())
    assert curve == losses_from_json(made, tmp_path / "dcn.json", planted[:2])


def test_two_embeddings(planted, tmp_path):
    made = families.wide_deep(*planted[:2], optimizer=ADAM)
    curve = losses_of(made, STEPS)
    of_file = RecordLayout(label_dim=1, dense_dim=3, inputs=inputs(("wide_data", 1), ("deep_data", 3)), key_bytes=8)
    assert curve == native_losses(native_wide_deep(), planted[0], of_file)
    assert curve == losses_from_json(made, tmp_path / "wide_deep.json", planted[:2])


def test_two_tasks(tmp_path):
    source = write_norm(tmp_path / "data", Planted(15_000, labels=2))
    made = families.mmoe(source, source, optimizer=ADAM)
    curve = losses_of(made, STEPS)
    assert curve == native_losses(native_mmoe(), source, layout(labels=2))
    weights = ["first_label", "second_label"], [0.5, 0.5]
    assert curve == losses_from_json(made, tmp_path / "mmoe.json", (source, source), *weights)


THREADS = """
import sys, torch
from tests.hugectr import families
from tests.hugectr.test_model import losses_of

for family in sys.argv[3:]:
    curves = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        curves.append(losses_of(getattr(families, family)(*sys.argv[1:3]), 10))
    print(family, curves[0] == curves[1], len(curves[0]), file=sys.stderr)
"""


def test_the_number_of_threads_changes_no_bit(planted):
    # MKL divides a product among threads as it likes, and on some processors the sums differ then. It does not where
    # this variable, which it reads once in a process, asks for the same bits.
    names = "dcn_v2", "deepfm", "fused_dlrm"
    ended = run_python(THREADS, *planted[:2], *names, environment={"MKL_CBWR": "COMPATIBLE"})
    assert ended.returncode == 0, ended.stderr
    printed = [line for line in ended.stderr.splitlines() if line.startswith(names)]
    assert printed == [f"{name} True 10" for name in names]
