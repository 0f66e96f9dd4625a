# SPDX-License-Identifier: Apache-2.0
"""Sessions, recommenders and caches of a parameter server on a device against the CPU."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.csv
import torch

from terarec.apps.recommend import Catalogue, Recommender
from terarec.apps.synthetic.movielens import generate
from terarec.batch import to_device
from terarec.checkpoint import load
from terarec.data import open_reader
from terarec.etl import prepare
from terarec.etl.ready import PRESETS
from terarec.etl.workflow import Workflow
from terarec.models.artifact import load_model
from terarec.ps.cache import EmbeddingCache
from terarec.serve import InferenceSession, ServedTables
from terarec.spec import (
    CacheSpec,
    DLRMSpec,
    HostMemorySpec,
    Numbers,
    ParameterServerSpec,
    PrepareOptions,
    RunSpec,
    TrainingSpec,
    TwoTowerSpec,
)
from terarec.train.retrieval import evaluate_towers
from terarec.train.run import build
from tests.on_device import CPU, Case, assert_near, assert_on, keep_in
from tests.ps.test_cache import KEYS, rows_of, tiers
from tests.serve.conftest import TrainedRun, train_in

USERS = {"userId": [1, 2, 10**9, None], "past_movies": [[3, 5, 8], [], [1], None]}
CASES: dict[str, Case] = {}
case = keep_in(CASES)
_DIRECTORY = tempfile.TemporaryDirectory()


@cache
def trained() -> TrainedRun:
    """Return a run that was trained on the CPU, for all cases of this process."""
    root = Path(_DIRECTORY.name) / "clicks"
    root.mkdir()
    return train_in(root)


def scores_of(device: torch.device, **options: object) -> np.ndarray:
    """Return the scores of the first records in two requests, and of the first batches of the split."""
    run = trained()
    with InferenceSession.open(run.path, device=device, **options) as session:  # type: ignore[arg-type]
        parts = [session.predict(run.records(0, 90)), session.predict(run.records(90, 91))]
        parts += [session.predict(run.records(0, 0)), session.predict(run.records(0, 90))]
        parts.append(next(iter(session.predict_split(run.data, "valid", batch_size=300))))
    return np.concatenate(parts)


@case
def sessions_with_every_kind_of_numbers(device: torch.device) -> None:
    exact = scores_of(CPU)
    for numbers, tolerance in (
        (None, 1e-5),
        (Numbers(row_type="int8"), 1e-5),
        (Numbers(precision="bf16"), 0.02),
    ):
        found, expected = (scores_of(target, numbers=numbers) for target in (device, CPU))
        assert np.abs(found - expected).max() <= tolerance, numbers
        assert np.abs(found - exact).max() <= 0.05, numbers


@case
def sessions_over_a_parameter_server(device: torch.device) -> None:
    exact = scores_of(CPU)
    server = ParameterServerSpec(tiers=(HostMemorySpec(),))
    for cached in (
        None,
        CacheSpec(form="dynamic", share=0.1),
        CacheSpec(form="static", share=0.1),
        CacheSpec(form="int8"),
    ):
        found = scores_of(device, tables=ServedTables(server=server, cache=cached))
        assert np.abs(found - exact).max() <= (0.01 if cached is not None and cached.form == "int8" else 1e-5), cached


@case
def a_session_that_moves_on(device: torch.device) -> None:
    run = trained()
    session = InferenceSession.open(run.path, device=device)
    expected = session.predict(run.records(0, 20))
    (newest,) = sorted((run.path / "checkpoints").glob("step-*"))[-1:]
    session.move_on(load(newest))
    assert np.array_equal(session.predict(run.records(0, 20)), expected)


@case
def caches_on_the_device(device: torch.device) -> None:
    for form in ("dynamic", "int8", "static"):
        generator = torch.Generator().manual_seed(1)
        held = EmbeddingCache(tiers(default=0.25), 100, CacheSpec(form=form), device)  # type: ignore[arg-type]
        held.fill(KEYS[:80], rows_of(KEYS[:80]))
        for size in (0, 1, 7, 60, 99, 101, 400, 50, 3):
            requested = KEYS[torch.randint(0, KEYS.numel(), (size,), generator=generator)].clone()
            if size:
                requested[-1] = 777_777
            expected = rows_of(requested)
            expected[requested == 777_777] = 0.25
            for keys in (requested, requested.to(device)):
                found = held.lookup(keys)
                assert_on(device, found)
                assert_near(found, expected, rtol=0.0, atol=8 / 510 if form == "int8" else 0.0)
        held.refresh()
        held.update(KEYS[:3], rows_of(KEYS[:3]))
        held.forget(KEYS[3:5].to(device))
        held.wait()
        assert_near(held.lookup(KEYS[:5]), rows_of(KEYS[:5]), rtol=0.0, atol=8 / 510 if form == "int8" else 0.0)


@case
def items_for_users(device: torch.device) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        generate(root / "raw", rows=600, seed=3)
        options = PrepareOptions(tables={"movies": (str(root / "raw" / "movies.csv"),)}, threads=1)
        workflow = Workflow.of(PRESETS["movielens"](min_count=1, history=5))
        prepare(workflow, [root / "raw" / "ratings.csv"], root / "data", options)
        towers = TwoTowerSpec(
            user=("userId", "past_movies", "past_count"), item=("movieId", "genres"), width=8, hidden=(), vector_width=8
        )
        training = TrainingSpec(batch_size=64, max_steps=10, reader_threads=1, device="cpu")
        for name, model in (("towers", towers), ("ranker", DLRMSpec(width=4, bottom=(4,), top=(8,)))):
            build(RunSpec(data=str(root / "data"), model=model, training=training), root / name).fit()
        films = pyarrow.csv.read_csv(root / "raw" / "movies.csv")
        found = []
        for target in (CPU, device):
            recommender = Recommender.open(
                root / "towers", Catalogue(films, "movieId"), ranker=root / "ranker", device=target
            )
            found.append(recommender.recommend(USERS, 6))
        assert found[0].items == found[1].items
        retrieved = []
        for target in (CPU, device):
            model = load_model(root / "towers", device=target).model
            batches = {name: list(open_reader(root / "data", name, batch_size=64)) for name in ("train", "valid")}
            of_host = evaluate_towers(model, batches["valid"], batches["train"], user="userId", k=(5,))  # type: ignore[arg-type]
            there = {name: [to_device(batch, target) for batch in part] for name, part in batches.items()}
            assert evaluate_towers(model, there["valid"], there["train"], user="userId", k=(5,)) == of_host  # type: ignore[arg-type]
            retrieved.append(of_host.values)
        assert_near(retrieved[1], retrieved[0])
