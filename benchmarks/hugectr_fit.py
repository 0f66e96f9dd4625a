"""`Model.fit` of the HugeCTR facade against the same graph model trained natively, from the same file.

Deep & Cross on Criteo-shaped samples in a Raw file: 13 numbers, 26 slots. Both sides read the file through a reader of
their own and take turns; the facade also displays, follows its schedule and checks its workspace.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from record import Row, append_rows

import terarec.hugectr as hugectr
from terarec.data.records import RawSource, RecordReader
from terarec.formats.hugectr import FixedRecordWriter, raw_types
from terarec.models import GraphModel
from terarec.spec import AdamSpec, RecordLayout, SparseInput
from terarec.train import GraphTrainer
from terarec.train.allocator import keep_freed_memory

DENSE, SLOTS, ROWS, WIDTH = 13, 26, 40_000, 16
CASE = "DCN, 26 slots of 40 k keys, width 16, 6 cross layers, deep 1024-1024, Adam, batch {batch}, Raw"


def layout() -> RecordLayout:
    """What a sample holds."""
    slots = SparseInput(name="data", nnz_per_slot=(1,) * SLOTS, is_fixed_length=True)
    return RecordLayout(label_dim=1, dense_dim=DENSE, inputs=(slots,), key_bytes=4, slot_sizes=(ROWS,) * SLOTS)


def write_data(path: Path, samples: int) -> None:
    """Random samples with power-law keys."""
    rng = np.random.default_rng(0)
    keys = [(ROWS * rng.random(samples) ** 4).astype(np.int64) for _ in range(SLOTS)]
    label = (rng.random((samples, 1)) < 0.25).astype(np.float32)
    with FixedRecordWriter(path, layout(), raw_types(layout(), float_label_dense=True)) as writer:
        writer.write(label, rng.random((samples, DENSE), dtype=np.float32), keys)
        writer.close()


def facade(path: str, samples: int, batch: int) -> hugectr.Model:
    """The model as a script builds it."""
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


def time_both(batch: int, iterations: int, repeats: int) -> Row:
    """The rate of the facade, its peer the native loop; medians of turns."""
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        path, samples = Path(folder) / "train.bin", batch * iterations
        write_data(path, samples)
        model = facade(str(path), samples, batch)
        adam = AdamSpec(lr=0.001, eps=1e-7, eps_hat=True)
        spec = model.module.spec
        rules = {embedding.optimizer: adam for embedding in spec.embeddings}
        trainer = GraphTrainer(GraphModel(spec, seed=1), adam, rules)
        source = RawSource(path, layout(), num_samples=samples, float_label_dense=True)
        reader = RecordReader(source, batch_size=batch, repeat=True, drop_last=True, threads=1)
        batches = iter(reader)

        def native() -> None:
            for _ in range(iterations):
                trainer.step(next(batches))

        def fit() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                model.fit(max_iter=iterations, display=10, eval_interval=0, snapshot=0)

        seconds: dict[str, list[float]] = {"native": [], "fit": []}
        for turn in range(repeats + 1):
            for name, side in (("native", native), ("fit", fit)):
                start = time.perf_counter()
                side()
                if turn:  # the first warms up, and inserts the keys
                    seconds[name].append(time.perf_counter() - start)
        reader.close()
        if trainer.step(next(iter(reader))) != _next_loss(model):
            raise SystemExit("hugectr_fit: the two sides have trained different models, expected the same bits")
        reader.close()
    return Row(
        case=CASE.format(batch=batch),
        metric="fit through the HugeCTR facade",
        value=samples / statistics.median(seconds["fit"]),
        unit="samples/s",
        peer="GraphTrainer.step in a loop",
        peer_value=samples / statistics.median(seconds["native"]),
    )


def _next_loss(model: hugectr.Model) -> float:
    """The loss of one more iteration."""
    model.train()
    return model.get_current_loss()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    append_rows("hugectr_fit", [time_both(batch, options.iterations, options.repeats) for batch in options.batches])


if __name__ == "__main__":
    main()
