# SPDX-License-Identifier: Apache-2.0
"""Embedding modules on a device against the same ones on the CPU: lookups, gradients, optimizers, copies."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terarec
from terarec.batch import Jagged
from terarec.embedding import EmbeddingCollection
from terarec.errors import KeyOutOfRangeError
from terarec.optim import RowOptimizer
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DynamicTableSpec,
    FeatureSpec,
    FTRLSpec,
    RowOptions,
    SGDSpec,
    SparseOptimizerSpec,
    TableSpec,
    Tiers,
)
from tests.embedding.plain import random_jagged
from tests.embedding.test_drop_in import BAGS, KEYS, OFFSETS, pair
from tests.embedding.test_drop_in_rows import KEYS as MODEL_KEYS
from tests.embedding.test_drop_in_rows import Model as DropIns
from tests.embedding.test_poolings import FEATURES, NAMES, ROWS, TABLES, weighted
from tests.embedding.test_replace import Model as PlainModel
from tests.errors import at
from tests.on_device import CPU, Case, assert_equal, assert_near, assert_on, keep_in

CASES: dict[str, Case] = {}
case = keep_in(CASES)


def passed(module: nn.Module, device: torch.device, *inputs: Tensor | None) -> dict[str, Tensor]:
    """Return what a copy of `module` on `device` gives, with gradients of weights and of floating inputs."""
    twin = copy.deepcopy(module).to(device)
    there = [value if value is None else value.detach().to(device) for value in inputs]
    learned = [value.requires_grad_() for value in there if value is not None and value.is_floating_point()]
    result = twin(*there)
    result.backward(torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(device, result.dtype))
    assert_on(device, result, twin.weight, twin.weight.grad)
    found = {"result": result, "weight": twin.weight, "grad": twin.weight.grad.to_dense()}
    return {name: value.detach() for name, value in found.items()} | {
        f"input {number}": value.grad for number, value in enumerate(learned) if value.grad is not None
    }


def follows(module: nn.Module, device: torch.device, *inputs: Tensor | None, tolerance: float = 1e-5) -> None:
    """Raise unless a module gives on `device` what it gives on the CPU."""
    assert_near(passed(module, device, *inputs), passed(module, CPU, *inputs), rtol=tolerance, atol=tolerance)


@case
def bags_of_every_form(device: torch.device) -> None:
    for (keys, offsets, with_last), mode, sparse, padding in itertools.product(
        BAGS.values(), ("sum", "mean", "max"), (False, True), (None, 7)
    ):
        if not (sparse and mode == "max"):
            options = {"mode": mode, "sparse": sparse, "padding_idx": padding, "include_last_offset": with_last}
            follows(pair("EmbeddingBag", **options)[0], device, keys, offsets)


@case
def bags_with_factors_of_keys(device: torch.device) -> None:
    for padding, sparse in itertools.product((None, 7), (False, True)):
        bag, _ = pair("EmbeddingBag", mode="sum", padding_idx=padding, sparse=sparse)
        follows(bag, device, KEYS, OFFSETS, torch.linspace(-1, 2, 12))
        follows(bag, device, KEYS.reshape(4, 3), None, torch.linspace(-1, 2, 12).reshape(4, 3))


@case
def embeddings_of_every_form(device: torch.device) -> None:
    for shape, sparse, padding in itertools.product([(12,), (3, 4), (0,), ()], (False, True), (None, -1)):
        keys = KEYS[: torch.Size(shape).numel()].reshape(shape)
        for given in (keys, keys.int()):
            follows(pair("Embedding", sparse=sparse, padding_idx=padding)[0], device, given)


@case
def narrow_modules(device: torch.device) -> None:
    for dtype, mode in itertools.product((torch.bfloat16, torch.float16), ("sum", "mean", "max")):
        tolerance = 2 * torch.finfo(dtype).eps
        follows(pair("EmbeddingBag", mode=mode, dtype=dtype)[0], device, KEYS, OFFSETS, tolerance=tolerance)
        follows(pair("Embedding", dtype=dtype)[0], device, KEYS, tolerance=tolerance)


@case
def norms_and_frequencies(device: torch.device) -> None:
    for sparse, norm in itertools.product((False, True), (1.0, 2.0)):
        options = {"sparse": sparse, "max_norm": 1.0, "norm_type": norm}
        follows(pair("EmbeddingBag", mode="sum", **options)[0], device, KEYS, OFFSETS)
        follows(pair("Embedding", **options)[0], device, KEYS)
        for kind, inputs in (("EmbeddingBag", (KEYS, OFFSETS)), ("Embedding", (KEYS,))):
            module, _ = pair(kind, padding_idx=7)
            module.scale_grad_by_freq, module.sparse = True, sparse
            follows(module, device, *inputs)


@case
def keys_outside_are_named(device: torch.device) -> None:
    for bad in (-1, 23):
        bag, _ = pair("EmbeddingBag")
        with pytest.raises(KeyOutOfRangeError):
            bag.to(device)(torch.tensor([1, bad], device=device), torch.tensor([0], device=device))
        table = EmbeddingCollection([TableSpec(name="t", rows=23, width=4)], [FeatureSpec(name="f", table="t")])
        jagged = Jagged(names=("f",), keys=torch.tensor([1, bad]), offsets=torch.tensor([0, 2]))
        with pytest.raises(KeyOutOfRangeError, check=at("feature 'f'", f"got key {bad}")):
            table.to(device)(on(jagged, device))


def on(jagged: Jagged, device: torch.device) -> Jagged:
    """Return `jagged` on `device`."""
    weights = None if jagged.weights is None else jagged.weights.detach().to(device)
    return replace(jagged, keys=jagged.keys.to(device), offsets=jagged.offsets.to(device), weights=weights)


@case
def a_model_with_replaced_embeddings(device: torch.device) -> None:
    results = []
    for target in (CPU, device):
        model = PlainModel().to(target)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(4):
            if step == 1:
                terarec.replace_embeddings(model)
            optimizer.zero_grad()
            model(torch.tensor([[1, 2, 2], [0, 4, 1]], device=target)).square().sum().backward()
            optimizer.step()
        assert type(model.bag) is terarec.EmbeddingBag
        results.append(dict(model.state_dict()))
    assert_near(results[1], results[0], rtol=1e-3, atol=1e-4)


@case
def drop_ins_with_a_row_optimizer(device: torch.device) -> None:
    for rule in (SGDSpec(lr=0.1), AdaGradSpec(lr=0.1, eps=1e-3), AdamSpec(lr=0.01, eps=1e-3)):
        results = []
        for target in (CPU, device):
            model = DropIns(terarec).to(target)
            optimizer = RowOptimizer(model, rule)
            for step in range(4):
                if step == 2:
                    twin = DropIns(terarec).to(target)
                    again = RowOptimizer(twin, rule)
                    twin.load_state_dict(model.state_dict())
                    again.load_state_dict(optimizer.state_dict())
                    model, optimizer = twin, again
                optimizer.zero_grad()
                model(MODEL_KEYS.to(target)).square().sum().backward()
                optimizer.step()
            results.append(dict(model.state_dict()))
        assert_near(results[1], results[0], rtol=1e-3, atol=1e-4)


def collection(kind: str, directory: str = "") -> EmbeddingCollection:
    """Return tables of several widths, and features of every pooling."""
    tables: list[Any] = list(TABLES)
    if kind.startswith("dynamic"):
        tables = [DynamicTableSpec(name=each.name, width=each.width, default=0.25) for each in TABLES]
    if kind.endswith(("bfloat16", "float16")):
        tables = [replace(each, dtype=kind.split()[-1]) for each in tables]
    if kind.endswith("in tiers"):
        tiers = Tiers(device="4KiB", host="4KiB", file=directory)
        tables = [replace(each, tiers=tiers) for each in tables]
    return EmbeddingCollection(tables, FEATURES, seed=2)


BATCHES = [
    random_jagged(NAMES, ROWS, 9, most=5),
    weighted(random_jagged(NAMES, ROWS, 6, seed=1)),
    random_jagged(NAMES, ROWS, 0),
]


def loss_of(found: Any) -> Tensor:
    """Return a number that depends on every vector."""
    total: Tensor = found.pooled.square().sum() + found.sequences["f2"].values.sin().sum()
    return total


def rows_of(module: EmbeddingCollection) -> dict[str, Tensor]:
    """Return weights and states of all tables, by key."""
    held = {}
    for name, table in module.tables.items():
        rows = table.export(table.keys())
        held |= {f"{name}/{part}": value for part, value in {"weights": rows.weights, **rows.state}.items()}
    return held


def trained(
    kind: str, rule: SparseOptimizerSpec, device: torch.device, step: Callable[..., None], directory: str
) -> dict[str, Tensor]:
    """Return outputs of a collection before and after it was trained on `device`, and its rows."""
    module = collection(kind, directory).to(device)
    optimizer = RowOptimizer(module, rule)
    found: dict[str, Tensor] = {}
    for number, batch in enumerate(BATCHES):
        out = module(on(batch, device))
        assert_on(device, out.pooled, out.sequences["f2"].values, out.sequences["f2"].offsets)
        found |= {f"pooled {number}": out.pooled.detach(), f"sequence {number}": out.sequences["f2"].values.detach()}
        step(module, optimizer, [on(batch, device), on(BATCHES[0], device)])
    module.eval()
    with torch.no_grad():
        out = module(on(BATCHES[0], device))
    found |= {"last": out.pooled} | rows_of(module)
    for arena in module.arenas:
        if arena.tiers is not None:
            arena.tiers.close()
    return found


def plain_step(module: EmbeddingCollection, optimizer: RowOptimizer, batches: Sequence[Jagged]) -> None:
    """Add up the gradients of all batches and update the rows."""
    optimizer.zero_grad()
    for batch in batches:
        loss_of(module(batch)).backward()
    optimizer.step()


def clipped_step(module: EmbeddingCollection, optimizer: RowOptimizer, batches: Sequence[Jagged]) -> None:
    """Update the rows by gradients that torch clips together."""
    optimizer.zero_grad()
    loss_of(module(batches[0])).backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    assert_on(module.arenas[0].device, norm)
    optimizer.step()


def scaled_step(module: EmbeddingCollection, optimizer: RowOptimizer, batches: Sequence[Jagged]) -> None:
    """Update the rows by gradients of a scaled loss; a step with an infinite one is skipped."""
    batch = batches[-1]  # the one before may have no keys, and so no gradient that is not finite
    scaler = torch.amp.GradScaler(module.arenas[0].device.type, init_scale=64.0)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(loss_of(module(batch)) * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 32.0


def learns_as_on_the_cpu(kind: str, rule: SparseOptimizerSpec, step: Callable[..., None], device: torch.device) -> None:
    """Raise unless a collection learns on `device` what it learns on the CPU."""
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        found, expected = trained(kind, rule, device, step, first), trained(kind, rule, CPU, step, second)
    tolerance = 0.02 if "float16" in kind else 1e-4  # sums may round the other way
    assert_near(found, expected, rtol=tolerance, atol=tolerance)


@case
def factors_of_keys_have_gradients(device: torch.device) -> None:
    grads = []
    for target in (CPU, device):
        module = collection("static").to(target)
        jagged = on(weighted(BATCHES[0]), target)
        assert jagged.weights is not None
        jagged.weights.requires_grad_()
        loss_of(module(jagged)).backward()
        assert jagged.weights.grad is not None
        grads.append(jagged.weights.grad)
    assert_near(grads[1], grads[0])


def quantized(kind: str, device: torch.device) -> None:
    """Rows of 8 bits, made on either side and moved, give what they give on the CPU."""
    module = collection(kind)
    for batch in BATCHES[:2]:
        module(batch)  # inserts keys
    packed = module.quantized()
    there = copy.deepcopy(module).to(device).quantized()
    moved = copy.deepcopy(packed).to(device)
    loaded = collection(kind).to(device).quantized()
    loaded.load_state_dict(packed.state_dict())
    assert_equal(dict(there.named_buffers()), dict(packed.named_buffers()))
    back = copy.deepcopy(there).to(CPU)
    for batch in (*BATCHES, random_jagged(NAMES, ROWS, 5, seed=7)):
        expected = packed(batch)
        for each in (there, moved, loaded):
            found = each(on(batch, device))
            assert_near(found.pooled, expected.pooled)
            assert_near(found.sequences["f2"].values, expected.sequences["f2"].values)
        assert_near(back(batch).pooled, expected.pooled)


def travels(kind: str, device: torch.device) -> None:
    """State and copies go between devices, and training goes on behind a move."""
    rule = AdaGradSpec(lr=0.1)
    mine, twin = collection(kind), collection(kind)
    optimizers = [RowOptimizer(each, rule) for each in (mine, twin)]
    for each, optimizer in zip((mine, twin), optimizers, strict=True):
        plain_step(each, optimizer, BATCHES[:1])
    twin.to(device)
    for target in (device, CPU, device):
        twin.to(target)
        plain_step(mine, optimizers[0], BATCHES[:1])
        plain_step(twin, optimizers[1], [on(BATCHES[0], target)])
    assert_near(rows_of(twin), rows_of(mine))
    assert_on(device, *rows_of(twin).values(), *twin.state_dict().values())
    loaded = collection(kind)
    loaded.load_state_dict(twin.state_dict())
    again = collection(kind).to(device)
    again.load_state_dict(mine.state_dict())
    copied = copy.deepcopy(twin)
    for batch in BATCHES:
        expected = mine.eval()(batch).pooled
        assert_near(loaded.eval()(batch).pooled, expected)
        assert_near(again.eval()(on(batch, device)).pooled, expected)
        assert_near(copied.eval()(on(batch, device)).pooled, expected)


@case
def rows_of_coming_batches_are_loaded_ahead(device: torch.device) -> None:
    keys = {name: torch.arange(count) for name, count in zip(NAMES, ROWS, strict=True)}
    for kind in ("static in tiers", "dynamic in tiers"):
        outputs = []
        for target in (CPU, device):
            with TemporaryDirectory() as directory:
                module = collection(kind, directory).to(target)
                optimizer = RowOptimizer(module, SGDSpec(lr=0.1))
                module.preload(keys)
                for number, batch in enumerate(BATCHES):
                    module.prefetch(batch)
                    if number == 1:
                        module.preload_next(keys, keys, lambda: True)
                    plain_step(module, optimizer, [on(batch, target)])
                outputs.append(module.eval()(on(BATCHES[0], target)).pooled.detach())
                for arena in module.arenas:
                    assert arena.tiers is not None
                    arena.tiers.close()
        assert_near(outputs[1], outputs[0])


@case
def compiled_models(device: torch.device) -> None:
    """A drop-in in training and a collection in evaluation, whose lookups are in the graph."""
    model = DropIns(terarec).to(device)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="eager")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    for _ in range(2):
        for each, optimizer in zip((model, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            each(MODEL_KEYS.to(device)).square().sum().backward()
            optimizer.step()
    assert_near(dict(twin.state_dict()), dict(model.state_dict()))
    for kind in ("static", "dynamic"):
        module = collection(kind).to(device)
        module(on(BATCHES[0], device))
        module.eval()
        with torch.no_grad():
            for batch in BATCHES[:2]:
                found = torch.compile(module, backend="eager")(on(batch, device))
                assert_near(found.pooled, module(on(batch, device)).pooled)
    torch.compiler.reset()


_PLAIN, _RULES = (
    plain_step,
    {
        "sgd": SGDSpec(lr=0.1),
        "adagrad": AdaGradSpec(lr=0.1, eps=1e-3),
        "ftrl": FTRLSpec(),
        "adam in lazy global mode": AdamSpec(lr=0.01, eps=1e-3, rows=RowOptions(mode="lazy_global")),
        "adam in global mode": AdamSpec(lr=0.01, eps=1e-3, rows=RowOptions(mode="global")),
        "sgd with every option": SGDSpec(
            lr=0.1,
            rows=RowOptions(
                l2=0.1, clip_value=1.0, clip_norm=0.9, clip_global_norm=2.0, table_lr={"b": 0.5}, non_finite="skip"
            ),
        ),
        "sgd of one table": SGDSpec(lr=0.1, rows=RowOptions(frozen=("b",), non_finite="raise")),
    },
)
_TABLE_KINDS = (
    *("static", "dynamic", "static bfloat16", "static float16", "dynamic bfloat16"),
    *("static in tiers", "dynamic in tiers"),
)
CASES |= {
    f"a collection of {kind} tables": partial(learns_as_on_the_cpu, kind, AdaGradSpec(lr=0.1, eps=1e-3), plain_step)
    for kind in _TABLE_KINDS
}
CASES |= {
    f"rows updated by {name}": partial(learns_as_on_the_cpu, "static", rule, _PLAIN) for name, rule in _RULES.items()
}
CASES |= {
    f"gradients of {kind} tables {how}": partial(learns_as_on_the_cpu, kind, SGDSpec(lr=0.1), step)
    for kind in ("static", "dynamic")
    for how, step in (("clipped", clipped_step), ("scaled", scaled_step))
}
CASES |= {f"8-bit rows of {kind} tables": partial(quantized, kind) for kind in ("static", "dynamic", "static bfloat16")}
CASES |= {
    f"{kind} tables moved and copied": partial(travels, kind) for kind in ("static", "dynamic", "static bfloat16")
}
