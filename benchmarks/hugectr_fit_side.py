"""Train the model of `hugectr_fit.py` as one side of the comparison, by `Model.fit` or in a loop.

It also runs at other commits of terarec: up to 0.2.0 a graph was trained by `GraphTrainer`.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

from json_answers import open_answers, serve

import terarec
import terarec.hugectr as hugectr
from terarec import train as training
from terarec.batch import Batch
from terarec.data.records import RawSource, RecordReader
from terarec.models import GraphModel
from terarec.spec import AdamSpec, RecordLayout, SparseInput

try:
    from terarec.train.devices import keep_freed_memory
except ModuleNotFoundError:  # 0.2.0
    from terarec.train.allocator import keep_freed_memory

DENSE, SLOTS, ROWS, WIDTH = 13, 26, 40_000, 16


def layout() -> RecordLayout:
    """Return the layout of a sample."""
    slots = SparseInput(name="data", nnz_per_slot=(1,) * SLOTS, is_fixed_length=True)
    return RecordLayout(label_dim=1, dense_dim=DENSE, inputs=(slots,), key_bytes=4, slot_sizes=(ROWS,) * SLOTS)


def script(path: str, samples: int, batch: int) -> hugectr.Model:
    """Return the model as a HugeCTR script builds it."""
    optimizer = hugectr.CreateOptimizer(update_type=hugectr.Update_t.Local)
    model = hugectr.Model(
        hugectr.CreateSolver(batchsize=batch, batchsize_eval=batch, lr=0.001, seed=1),
        hugectr.DataReaderParams(
            data_reader_type=hugectr.DataReaderType_t.Raw,
            source=path,
            eval_source=path,
            num_samples=samples,
            eval_num_samples=samples,
            float_label_dense=True,
            slot_size_array=[ROWS] * SLOTS,
            num_workers=1,
        ),
        optimizer,
    )
    sparse = [hugectr.DataReaderSparseParam("data", 1, True, SLOTS)]
    model.add(hugectr.Input(1, "label", DENSE, "dense", sparse))
    kind = hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash
    model.add(hugectr.SparseEmbedding(kind, 400, WIDTH, "sum", "embedding", "data"))
    for layer, bottoms, top, options in (
        ("Reshape", "embedding", "flat", {"leading_dim": SLOTS * WIDTH}),
        ("Concat", "flat dense", "all", {}),
        ("MultiCross", "all", "cross", {"num_layers": 6}),
        ("InnerProduct", "all", "fc1", {"num_output": 1024}),
        ("ReLU", "fc1", "relu1", {}),
        ("InnerProduct", "relu1", "fc2", {"num_output": 1024}),
        ("ReLU", "fc2", "relu2", {}),
        ("Concat", "cross relu2", "both", {}),
        ("InnerProduct", "both", "logit", {"num_output": 1}),
        ("BinaryCrossEntropyLoss", "logit label", "loss", {}),
    ):
        model.add(hugectr.DenseLayer(hugectr.Layer_t[layer], bottoms.split(), [top], **options))
    model.compile()
    return model


class Loop:
    """The graph in a plain loop over its own reader."""

    def __init__(self, path: str, samples: int, batch: int) -> None:
        keep_freed_memory()
        spec = script(path, samples, batch).module.spec
        model, adam = GraphModel(spec, seed=1), AdamSpec(lr=0.001, eps=1e-7, eps_hat=True)
        rules = {embedding.optimizer: adam for embedding in spec.embeddings}
        self._step: Callable[[Batch], object]
        if hasattr(training, "GraphTrainer"):
            self._step = training.GraphTrainer(model, adam, rules).step
        else:
            from terarec.spec import TrainingSpec

            optimizers = training.Optimizers.of(model, adam, rules)
            self._step = training.Trainer(model, TrainingSpec(batch_size=batch), optimizers).train_step
        source = RawSource(path, layout(), num_samples=samples, float_label_dense=True)
        reader = RecordReader(source, batch_size=batch, repeat=True, drop_last=True, threads=1)
        if hasattr(reader, "next_batch"):
            self._next: Callable[[], Batch] = reader.next_batch
        else:
            self._next = iter(reader).__next__

    def run(self, iterations: int) -> float:
        """Train; return the seconds."""
        start = time.perf_counter()
        for _ in range(iterations):
            self._step(self._next())
        return time.perf_counter() - start

    def loss(self) -> float:
        """Train on one more batch and return its loss."""
        return float(self._step(self._next()))  # type: ignore[arg-type]  # a tensor


class Fit:
    """`Model.fit`, with displays, its learning rate schedule and the check of its workspace."""

    def __init__(self, path: str, samples: int, batch: int) -> None:
        self._model = script(path, samples, batch)

    def run(self, iterations: int) -> float:
        """Train; return the seconds."""
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            self._model.fit(max_iter=iterations, display=10, eval_interval=0, snapshot=0)
        return time.perf_counter() - start

    def loss(self) -> float:
        """Train on one more batch and return its loss."""
        self._model.train()
        return self._model.get_current_loss()


if __name__ == "__main__":
    answers = open_answers()
    kind, path, samples, batch = sys.argv[1:]
    worker = {"loop": Loop, "fit": Fit}[kind](path, int(samples), int(batch))
    serve(worker, str(Path(terarec.__file__).parent), answers)
