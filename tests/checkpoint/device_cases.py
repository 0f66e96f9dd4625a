# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, deltas and runs of one device, loaded and resumed on another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
import torch

from terarec.batch import one_hot
from terarec.checkpoint import TrainState, load, save
from terarec.data import open_reader
from terarec.embedding import EmbeddingCollection
from terarec.models.artifact import load_model
from terarec.optim import RowOptimizer
from terarec.spec import AdamSpec, DynamicTableSpec, FeatureSpec, TableSpec, Tiers, counting_filter, freq, lru
from terarec.spec.model import ModelSpec
from terarec.train import evaluate, predict
from tests.on_device import CPU, Case, assert_equal, assert_near, keep_in
from tests.train import kernel_run
from tests.train.small_run import weights

NUM_KEYS = 300
FEATURES = [FeatureSpec(name="f", table="t"), FeatureSpec(name="g", table="u")]
TABLES: dict[str, list[TableSpec | DynamicTableSpec]] = {
    "static": [TableSpec(name="t", rows=NUM_KEYS, width=8), TableSpec(name="u", rows=NUM_KEYS, width=8)],
    "bfloat16": [TableSpec(name=name, rows=NUM_KEYS, width=8, dtype="bfloat16") for name in "tu"],
    "dynamic": [
        DynamicTableSpec(name="t", width=8, max_rows=100, evict=lru(), admit=freq(2), report_evicted=True),
        DynamicTableSpec(name="u", width=8, track_uses=True, admit=counting_filter(2, num_bytes=256)),
    ],
}
CASES: dict[str, Case] = {}
case = keep_in(CASES)


@dataclasses.dataclass
class Training:
    """Tables with their optimizer, on a device."""

    embedding: EmbeddingCollection
    optimizer: RowOptimizer
    device: torch.device

    def run(self, numbers: range) -> None:
        """Take a step with the batch of each number."""
        for number in numbers:
            keys = torch.randint(0, NUM_KEYS, (2, 20), generator=torch.Generator().manual_seed(number))
            looked_up = self.embedding(one_hot(["f", "g"], keys.to(self.device))).pooled
            looked_up.square().sum().backward()
            self.optimizer.step()

    def state(self, step: int) -> TrainState:
        """Return what a checkpoint of these tables alone holds."""
        empty = {"state": {}, "param_groups": []}
        tables, rng = self.embedding.tables, torch.get_rng_state()
        return TrainState(step=step, dense={}, tables=tables, optimizer=empty, rng=rng, progress={})

    def contents(self) -> dict[str, torch.Tensor]:
        """Return rows, states, uses and memory of all tables, on the CPU."""
        held = {}
        for name, table in self.embedding.tables.items():
            rows = table.export(table.keys())
            parts = {"keys": rows.keys, "weights": rows.weights, **rows.state, **rows.uses}
            for piece in () if table.keyed is None else table.keyed.export_memory(10**6):
                parts |= {part: values.flatten().sort().values for part, values in piece.items()}
            held |= {f"{name}/{part}": values.cpu() for part, values in parts.items()}
        return held


@contextmanager
def begun(kind: str, device: torch.device) -> Iterator[Training]:
    """Give a training of one of `TABLES`, which "in tiers" puts into files."""
    with TemporaryDirectory() as files:
        tables = TABLES[kind.removesuffix(" in tiers")]
        if kind.endswith("in tiers"):
            tiers = Tiers(device="24KiB", host="24KiB", file=files)
            tables = [dataclasses.replace(table, tiers=tiers) for table in tables]
        embedding = EmbeddingCollection(tables, FEATURES, seed=1).to(device)
        optimizer = RowOptimizer(embedding, AdamSpec(lr=0.05))
        try:
            yield Training(embedding, optimizer, device)
        finally:
            for arena in embedding.arenas:
                if arena.tiers is not None:
                    arena.tiers.close()


def loads_anywhere(kind: str, writer: str, device: torch.device) -> None:
    """A base and deltas that the device or the CPU wrote load on both, and training goes on from them."""
    saver = device if writer == "device" else CPU
    with TemporaryDirectory() as directory, begun(kind, saver) as trained:
        base = Path(directory)
        trained.run(range(8))
        paths = [save(base, trained.state(0), kind="base")]
        for step in (1, 2):
            trained.run(range(6 + 2 * step, 8 + 2 * step))
            if kind.startswith("dynamic"):
                trained.embedding.tables["u"].evict(lru(), keep_at_least=len(trained.embedding.tables["u"]) - 3)
            paths.append(save(base, trained.state(step), kind="delta"))
        expected = trained.contents()
        for loader in (device, CPU):
            with begun(kind, loader) as loaded:
                loaded.run(range(90, 92))  # which loading takes back
                load(paths[0]).load_tables(loaded.embedding.tables, with_state=True)
                load(paths[2]).load_tables(loaded.embedding.tables, with_state=True)
                assert_equal(loaded.contents(), expected)


def goes_on(kind: str, device: torch.device) -> None:
    """A training that is saved and loaded on the device goes on bit for bit as the one that was not."""
    with TemporaryDirectory() as directory, begun(kind, device) as trained, begun(kind, device) as loaded:
        trained.run(range(8))
        load(save(Path(directory), trained.state(8))).load_tables(loaded.embedding.tables, with_state=True)
        # Adam corrects its moments by the number of steps.
        loaded.optimizer.load_state_dict(trained.optimizer.state_dict())
        for each in (trained, loaded):
            each.run(range(8, 14))
        assert_equal(loaded.contents(), trained.contents())


@case
def a_state_of_the_device_comes_back_to_the_bit(device: torch.device) -> None:
    """Layers with statistics and the dense optimizer, from either side to either."""
    torch.manual_seed(1)
    for saver in (device, CPU):
        layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to(saver)
        optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
        layers(torch.randn(8, 4).to(saver)).square().mean().backward()
        optimizer.step()
        with TemporaryDirectory() as directory, begun("static", saver) as trained:
            state = dataclasses.replace(trained.state(1), dense=layers.state_dict(), optimizer=optimizer.state_dict())
            checkpoint = load(save(Path(directory), state))
            assert_equal(checkpoint.dense(), layers.state_dict())
            for target in (device, CPU):
                twin = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to(target)
                twin.load_state_dict(checkpoint.dense())
                again = torch.optim.Adam(twin.parameters(), lr=0.5)
                again.load_state_dict(checkpoint.optimizer())
                for mine, theirs in zip(again.state.values(), optimizer.state.values(), strict=True):
                    assert_equal(mine, theirs)


def resumes_to_the_bit(model: ModelSpec, device: torch.device) -> None:
    """A run that is stopped and resumed on the device has the weights of one without a stop."""
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        stopped = kernel_run.train(Path(first), model, device=device)
        straight = kernel_run.train(Path(second), model, device=device, stops=(None,))
        assert_equal(stopped["weights"], straight["weights"])
        assert stopped["losses"] == straight["losses"]


def resumes_elsewhere(model: ModelSpec, device: torch.device) -> None:
    """A run goes on on the CPU from where the device stopped, and the other way round; its model is loaded on both."""
    with TemporaryDirectory() as whole:
        expected = kernel_run.train(Path(whole), model, stops=(None,))
    for first, second in ((device, CPU), (CPU, device)):
        with TemporaryDirectory() as directory:
            path = Path(directory)
            before = kernel_run.train(path, model, device=first, stops=(kernel_run.BEFORE_STOP,))
            after = kernel_run.train(path, model, device=second, stops=(None,))
            kernel_run.assert_follows({**after, "losses": before["losses"] + after["losses"]}, expected)
            scores = []
            for target in (device, CPU):
                loaded = load_model(path / "run", device=target).model
                found = {name: held.cpu() for name, held in weights(loaded).items()}
                assert_equal(found, {name: after["weights"][name] for name in found})
                assert_near(
                    evaluate(loaded, open_reader(path / "data", "valid", batch_size=16)).logloss,
                    after["metrics"]["logloss"],
                )
                out = path / f"{target.type}.parquet"
                predict(path / "run", path / "data", "valid", out, replace=True, device=target)
                scores.append(torch.from_numpy(pq.read_table(out)["score"].to_numpy()))
            assert_near(scores[0], scores[1])


CASES |= {
    f"checkpoints of {kind} tables from the {writer}": partial(loads_anywhere, kind, writer)
    for kind in ("static", "bfloat16", "dynamic", "static in tiers", "dynamic in tiers")
    for writer in ("device", "CPU")
}
CASES |= {
    f"{kind} tables that go on from a checkpoint": partial(goes_on, kind)
    for kind in ("static", "bfloat16", "dynamic", "dynamic in tiers")
}
CASES |= {
    f"a run over {tables} tables resumed to the bit": partial(resumes_to_the_bit, kernel_run.MODELS[tables])
    for tables in ("static", "dynamic")
}
CASES |= {
    f"a run over {tables} tables resumed elsewhere": partial(resumes_elsewhere, kernel_run.MODELS[tables])
    for tables in kernel_run.MODELS
}
