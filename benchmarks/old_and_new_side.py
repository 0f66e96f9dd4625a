# SPDX-License-Identifier: Apache-2.0
"""Run a case of `old_and_new` in one checkout: ``python -m old_and_new_side CHECKOUT CASE FOLDER``.

A case is built from the benchmarks of the checkout, which match its interfaces.
"""

from __future__ import annotations

import gc
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from json_answers import open_answers, serve

Work = Mapping[str, Callable[[], object]]


def embedding(_: Path) -> Work:
    """Return lookups and row updates, each repeated many times, or run once if it takes milliseconds."""
    import embedding as script

    rule = script.row_rule if hasattr(script, "row_rule") else lambda kind, **given: script.RowRule(kind=kind, **given)
    sgd, adagrad = rule("sgd", lr=0.01), rule("adagrad", lr=0.01, eps=1e-10)
    shared: dict[str, Any] = {"name": "", "zipf": 1.05, "optimizer": None, "is_bound_by_memory": False}
    wide = script.Case(tables=26, rows=100_000, width=128, hotness=1, batch=8192, rule=sgd, **shared)
    many = script.Case(tables=100, rows=8192, width=16, hotness=10, batch=8192, rule=adagrad, **shared)
    cases = {"26 x 100000 x 128": wide, "100 x 8192 x 16, 10 keys": many}
    sides = {name: script.Ours(case, script.Inputs(case)) for name, case in cases.items()}
    return {
        **{f"lookup, {name}": side.look_up for name, side in sides.items()},
        **{f"{side.rule.kind} update, {name}": side.update for name, side in sides.items()},
    }


def index(_: Path) -> Work:
    """Return the insertion of 2 M keys with growth, and their search."""
    import hash_index as script

    keys = script.keys_of(2_000_000)
    held, _ = script.insert_ours(keys)
    searched = script.searched_of(keys)
    return {"insert 2 M keys": lambda: script.insert_ours(keys), "find 1 M keys": lambda: held.find(searched)}


def calls(_: Path) -> Work:
    """Return calls of one sample, for inference and for training."""
    import call_overhead as script
    import torch

    evaluated, trained = script.Sides(), script.Sides()
    evaluated.collection.eval()
    trained.collection.train()
    inference = {"lookup": evaluated.ours, "the op alone": evaluated.op, "the launcher alone": evaluated.launcher}
    training = {
        "lookup that trains": trained.ours,
        "lookup and backward": trained.ours_with_backward,
        "lookup, backward and SGD": trained.ours_with_step,
    }
    return {
        **{name: torch.inference_mode()(_repeated(call, 500)) for name, call in inference.items()},
        **{name: _repeated(call, 200) for name, call in training.items()},
    }


def dlrm(_: Path, precision: str) -> Work:
    """Return steps of DLRM by `Trainer`."""
    import step_sides as script

    workload = script.WORKLOADS["gemm"]
    step, samples = script.SIDES["terarec"](workload, precision), itertools.cycle(script.batches(workload))
    return {f"step of 8192, {precision}": lambda: step(next(samples))}


def tiers(folder: Path) -> Work:
    """Return steps on a table of which a tenth is in memory."""
    import tiered_memory as script

    rows = 200_000
    host = f"{rows * script.ROW_BYTES // 10 >> 20}MiB"
    table, seeds = script.Table(rows, script.Tiers(host=host, file=str(folder / "rows"))), itertools.count()
    table.fill()
    return {f"4 steps of {script.BATCH}, 10 % in memory": lambda: table.train(4, next(seeds))}


def keras(_: Path) -> Work:
    """Return steps of HugeCTR's graph models, the side of terarec in the comparison with Keras."""
    from keras_sides.graph_model import Graph
    from keras_sides.workload import Workload, draw

    work: dict[str, Callable[[], object]] = {}
    for model in ("wdl", "dcn"):
        workload = Workload(model=model, most_rows=100_000)
        side = Graph(workload, "lazy_global")
        side.prepare(draw(workload, 512, 6))
        work[f"{model}, step of 512"] = _cycled(side.step, 6)
    return work


def readers(folder: Path) -> Work:
    """Return readers of data sets."""
    import reader as script

    work: dict[str, Callable[[], object]] = {}
    for storage in ("parquet", "raw"):
        script.write(folder / storage, storage, 1 << 19)
        for name, shuffle in (("in order", False), ("shuffled", True)):
            work[f"{storage}, {name}"] = lambda storage=storage, shuffle=shuffle: script.drain(
                script.Reader(folder / storage, batch_size=script.BATCH, shuffle=shuffle)
            )
    return work


def records(folder: Path) -> Work:
    """Return readers of HugeCTR's files."""
    import hugectr_reader as script

    work: dict[str, Callable[[], object]] = {}
    for kind in ("raw", "raw_async", "norm", "parquet"):
        generator = script.RecordGenerator(kind=kind, layout=script.LAYOUT, alpha=1.2)
        num_files, rows = (4, 1 << 16) if kind in ("norm", "parquet") else (1, 1 << 18)
        made = script.generate_records(generator, folder / kind / "data", num_files=num_files, rows_per_file=rows)
        source = script.open_source(kind, folder / kind / "data", made.rows)
        work[kind] = partial(script.drain, source, 8192)
    return work


def prepare(folder: Path) -> Work:
    """Return the preparation of Criteo's text with and without fitting; both checkouts share the log."""
    import prepare as script

    log = folder.parent / "log" / "day_0.tsv"
    names = {"terarec": "fit and transform", "fitted workflow": "transform"}

    def run(side: str) -> None:
        shutil.rmtree(folder / side, ignore_errors=True)
        script.SIDES[side](log, folder / side)

    return {what: partial(run, side) for side, what in names.items()}


def workflow_records(_: Path) -> Work:
    """Return the encoding of raw records by a workflow."""
    workflow, raw = _criteo()
    requests = {count: {name: values[:count] for name, values in raw.items()} for count in (1, 32, 1000)}
    repeats = {1: 300, 32: 100, 1000: 10}
    return {
        f"encode {count} records": _repeated(partial(workflow.encode, request), repeats[count])
        for count, request in requests.items()
    }


def serving(_: Path) -> Work:
    """Return the scoring of raw records by a session."""
    from terarec.models import build_model
    from terarec.serve import InferenceSession
    from terarec.spec import DLRMSpec, RunSpec

    workflow, raw = _criteo()
    data = workflow.dataset_spec()
    session = InferenceSession(build_model(DLRMSpec(), data), workflow, RunSpec(data="none"), data, step=0)
    requests = {count: {name: values[:count] for name, values in raw.items()} for count in (1, 1000)}
    repeats = {1: 200, 1000: 5}
    return {
        f"score {count} records": _repeated(partial(session.predict, request), repeats[count])
        for count, request in requests.items()
    }


def _criteo() -> tuple[Any, dict[str, list[Any]]]:
    """Return a fitted workflow of Criteo's columns, and raw records for it."""
    import numpy as np
    import workflow_records as script

    block = script.training_block(np.random.default_rng(0))
    return script.fitted(script.criteo(), block), script.records(block, 0, 1000)


def _cycled(step: Callable[[int], object], count: int) -> Callable[[], object]:
    numbers = itertools.cycle(range(count))
    return lambda: step(next(numbers))


def _repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


CASES: Mapping[str, Callable[[Path], Work]] = {
    "embedding": embedding,
    "index": index,
    "calls": calls,
    "dlrm": partial(dlrm, precision="fp32"),
    "dlrm-bf16": partial(dlrm, precision="bf16"),
    "tiers": tiers,
    "keras": keras,
    "readers": readers,
    "records": records,
    "prepare": prepare,
    "workflow-records": workflow_records,
    "serving": serving,
}


class Worker:
    """Runs the functions of a case, one at a time.

    Args:
        work: Functions by name.
    """

    def __init__(self, work: Work) -> None:
        self._work = work

    def names(self) -> Sequence[str]:
        """Return the names of the functions, after one run of each."""
        for call in self._work.values():
            call()
        gc.collect()
        gc.freeze()  # a garbage collection takes 0.2 s with torch and pyarrow imported
        return list(self._work)

    def time(self, *, name: str) -> Sequence[float]:
        """Return the wall and CPU seconds of a run, the latter over all threads; collect garbage before it."""
        gc.collect()
        begin, cpu = time.perf_counter(), time.process_time()
        self._work[name]()
        return time.perf_counter() - begin, time.process_time() - cpu


def main() -> None:
    answers = open_answers()
    checkout, case, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    sys.path[:0] = [str(checkout / "src"), str(checkout / "benchmarks")]
    import terarec

    assert terarec.__file__ is not None
    if not Path(terarec.__file__).is_relative_to(checkout):
        raise SystemExit(f"got terarec from {terarec.__file__}, expected that of {checkout}")
    folder.mkdir(parents=True, exist_ok=True)
    serve(Worker(CASES[case](folder)), terarec.__version__, answers)


if __name__ == "__main__":
    main()
