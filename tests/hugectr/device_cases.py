# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's scripts on a device against the CPU: training, files, embedding training cache and inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import terarec.hugectr as hugectr
from terarec.batch import to_device
from terarec.hugectr.inference import CreateInferenceSession, InferenceModel, InferenceParams
from tests.hugectr import families
from tests.hugectr.planted import ROWS, Planted, histories, write_norm, write_raw_async
from tests.hugectr.test_training_cache import BATCHES, CACHED, KINDS, STAGED, cache_of, etc, keysets, make
from tests.on_device import CPU, Case, assert_near, keep_in

STEPS, BATCH, SAMPLES = 4, 100, 400
SGD = {"optimizer_type": hugectr.Optimizer_t.SGD}
ADAM = {"optimizer_type": hugectr.Optimizer_t.Adam, "update_type": hugectr.Update_t.Global, "epsilon": 1e-3}
CASES: dict[str, Case] = {}
case = keep_in(CASES)


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Let scripts train and serve on `device`, whatever GPUs they name, and print nothing."""
    with (
        patch("terarec.hugectr.compilation.placement", lambda vvgpu, num_gpus=None: (device, "")),
        patch("terarec.hugectr.inference.session.device_of", lambda numbers: device),
        redirect_stdout(StringIO()),
    ):
        yield


def sources(directory: Path, family: str) -> tuple[str, str]:
    """Return the lists of training and evaluation files of a family."""
    draw: Callable[..., Any] = histories if family == "din" else Planted
    return tuple(write_norm(directory / f"{seed}", draw(SAMPLES, seed=seed)) for seed in (1, 2))  # type: ignore[return-value]


def of_collection(directory: Path, **settings: Any) -> Any:
    """Return a model over an embedding collection of static and dynamic tables."""
    paths = [write_raw_async(directory / f"{seed}.bin", Planted(SAMPLES, seed=seed)) for seed in (1, 2)]
    return families.collection_flat(families.raw_async_reader(*paths, SAMPLES, SAMPLES), **settings)


def rows_of(made: Any) -> dict[str, torch.Tensor]:
    """Return weights and states of all tables, by key."""
    held = {}
    for number, collection in enumerate(made.module.embeddings.values()):
        for name, table in collection.tables.items():
            rows = table.export(table.keys())
            held |= {f"{number} {name} {part}": value for part, value in {"": rows.weights, **rows.state}.items()}
    return held


def trains_as_on_the_cpu(family: str, device: torch.device) -> None:
    """Losses, metrics, rows and files of a script are those of the CPU, and training goes on from the files."""
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        settings = {"optimizer": ADAM if family == "dnn" else SGD, "batchsize": BATCH, "batchsize_eval": BATCH}
        build: Callable[[], Any]
        if family == "collection":
            build = partial(of_collection, folder, batchsize=BATCH, batchsize_eval=BATCH)
        else:
            build = partial(getattr(families, family), *sources(folder, family), **settings)
        found = []
        for name, target in (("cpu", CPU), ("device", device)):
            with on(target):
                made = build()
                made.fit(max_iter=STEPS, display=2, eval_interval=2, snapshot=0)
                made.eval()
                metrics = {kind: value for kind, value in made.get_eval_metrics() if kind != "AUC"}
                made.save_params_to_files(str(folder / name), STEPS)
                found.append((metrics, rows_of(made)))
        for mine, theirs in zip(found[1], found[0], strict=True):
            assert_near(mine, theirs, rtol=1e-3, atol=1e-4)
        if family == "collection":
            return
        continued = []
        for target, name in ((device, "cpu"), (CPU, "device"), (device, "device")):
            with on(target):
                made = build()
                sparse = sorted(str(path) for path in folder.glob(f"{name}*_sparse_{STEPS}.model"))
                made.load_dense_weights(str(folder / f"{name}_dense_{STEPS}.model"))
                made.load_sparse_weights([path for path in sparse if "_opt_" not in path])
                made.load_dense_optimizer_states(str(folder / f"{name}_opt_dense_{STEPS}.model"))
                made.load_sparse_optimizer_states([path for path in sparse if "_opt_" in path])
                made.start_data_reading()
                for _ in range(2):
                    made.train()
                continued.append(rows_of(made) | {"loss": torch.tensor(made.get_current_loss())})
        for each in continued[:2]:
            assert_near(each, continued[2], rtol=1e-3, atol=1e-4)


def passes_equal_training_without(kind: Any, ps_type: Any, device: torch.device) -> None:
    """Training pass by pass on the device gives the rows of training at once."""
    with TemporaryDirectory() as directory:
        (plain, trainer), (net, cached) = make(kind, device), make(kind, device)
        cache = cache_of(net, etc(Path(directory) / "rows", ps_type=ps_type), kind)
        paths = keysets(Path(directory), kind)
        for _ in range(2):
            for path, samples in zip(paths, BATCHES, strict=True):
                cache.update(path)
                there = to_device(samples, device)
                assert_near(cached.train_step(there), trainer.train_step(there))
        ((keys, vectors),) = cache.incremental_model()
        assert len(keys) == len(vectors) > 0
        for samples in BATCHES:
            there = to_device(samples, device)
            assert_near(net.eval().predict(there), plain.eval().predict(there))


@case
def sessions_over_caches_on_the_device(device: torch.device) -> None:
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        data = Planted(SAMPLES, seed=2)
        with on(CPU):
            made = families.dnn(*sources(folder, "dnn"), batchsize=BATCH, batchsize_eval=BATCH)
            made.fit(max_iter=STEPS, display=0, eval_interval=0)
            made.graph_to_json(str(folder / "graph.json"))
            made.save_params_to_files(str(folder / "m"), STEPS)
        keys = (data.keys.T + ROWS * np.arange(4))[:20]
        request = data.dense[:20].reshape(-1).tolist(), keys.reshape(-1).tolist(), [*range(keys.size + 1)]
        scores: list[list[Any]] = []
        for target in (CPU, device):
            scores.append([])
            for cached in (True, False):
                params = InferenceParams(
                    model_name="dnn",
                    max_batchsize=BATCH,
                    hit_rate_threshold=1.0,
                    dense_model_file=str(folder / f"m_dense_{STEPS}.model"),
                    sparse_model_files=[str(folder / f"m0_sparse_{STEPS}.model")],
                    device_id=0,
                    use_gpu_embedding_cache=cached,
                    cache_size_percentage=0.5,
                    i64_input_key=True,
                )
                with on(target):
                    session = CreateInferenceSession(str(folder / "graph.json"), params)
                    for _ in range(2):
                        scores[-1].append(torch.tensor(session.predict(*request)))
                    session.close()
                    model = InferenceModel(str(folder / "graph.json"), params)
                    files = (hugectr.DataReaderType_t.Norm, hugectr.Check_t.Sum)
                    scores[-1].append(torch.from_numpy(model.predict(2, str(folder / "2" / "list.txt"), *files)))
                    scores[-1].append(torch.from_numpy(model.check_out_tensor("embedding")))
        for mine, theirs in zip(scores[1], scores[0], strict=True):
            assert_near(mine, theirs)


CASES |= {
    f"script of {family}": partial(trains_as_on_the_cpu, family)
    for family in ("dnn", "dcn_v2", "deepfm", "fused_dlrm", "din", "collection")
}
CASES |= {
    f"{ps_type.name} cache of {kind.name}": partial(passes_equal_training_without, kind, ps_type)
    for kind in KINDS
    for ps_type in (STAGED, CACHED)
}
