"""Raw Criteo rows to batches on a device: `DeviceTransform`, compared with the same work on one core of the CPU."""

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from gpu_clock import once, seconds
from record import Row

from terarec.etl import fit
from terarec.etl.columns import Rows, from_arrow
from terarec.etl.device import DeviceTransform
from terarec.etl.ready import criteo
from terarec.etl.workflow import Workflow
from terarec.ragged import flat_values
from terarec.spec import PrepareOptions

_BATCH_ROWS = 1 << 16


def transforms(device: torch.device, rows: int, copy: float) -> Iterator[Row]:
    """Yield the rows of tensors, Arrow batches and a Parquet file -> batches on the device.

    Args:
        device: The device.
        rows: Rows of the file.
        copy: Bytes a second of a large copy on the device.
    """
    with tempfile.TemporaryDirectory(prefix="terarec-gpu-") as name:
        path = Path(name) / "log.parquet"
        pq.write_table(_raw_rows(rows), path, row_group_size=_BATCH_ROWS)
        workflow = _fitted(path)
        on_device = DeviceTransform(workflow, device)
        (batch, *_) = pq.ParquetFile(path).iter_batches(_BATCH_ROWS)
        size = batch.num_rows
        _check_right(workflow, on_device, batch)
        on_cpu = size / min(_cpu_seconds(workflow, batch) for _ in range(3))
        case = f"transform Criteo, batches of {size:,} rows"
        block = on_device.load(batch)
        moved = sum(8 * len(flat_values(column)) for column in block.columns.values()) + (4 * 14 + 8 * 26) * size
        figures = {
            "tensors": size / seconds(lambda: on_device.transform(block), device),
            "an Arrow batch": size / seconds(lambda: on_device(batch), device),
            "a Parquet file": rows / once(lambda: _read_file(on_device, path), device),
        }
        for source, rate in figures.items():
            yield Row(
                case=f"{case}, from {source}",
                metric="rate",
                value=rate,
                unit="rows/s",
                peer="Workflow.apply on one core",
                peer_value=on_cpu,
                limit=copy / (moved / size) if source == "tensors" else None,
            )


def _raw_rows(rows: int) -> pa.Table:
    """Return rows with a tenth of the values missing; categories of 100 to 1,000,000 values, skewed."""
    generator = np.random.default_rng(0)
    columns: dict[str, pa.Array] = {"label": pa.array(generator.integers(0, 2, rows))}
    for number in range(1, 14):
        values = np.floor(generator.lognormal(2.0, 2.0, rows)).astype(np.int64) - 2
        columns[f"I{number}"] = pa.array(values, mask=generator.random(rows) < 0.1)
    for number, values in enumerate(np.geomspace(100, 1e6, 26).astype(np.int64), 1):
        drawn = (generator.random(rows) ** 3 * values).astype(np.int64) * 2654435761 % 2**32
        columns[f"C{number}"] = pa.array(drawn.astype(np.uint32), mask=generator.random(rows) < 0.1)
    return pa.table(columns)


def _fitted(path: Path) -> Workflow:
    spec = criteo(split=None, min_count=2)
    spec = dataclasses.replace(spec, source=dataclasses.replace(spec.source, format="parquet"))
    return fit(Workflow.of(spec), [path], PrepareOptions())


def _block(workflow: Workflow, batch: pa.RecordBatch) -> Rows:
    kinds = workflow.plan.types[0]
    columns = {name: from_arrow(batch.column(name), found.kind) for name, found in kinds.items()}
    return Rows(columns, np.arange(batch.num_rows))


def _cpu_seconds(workflow: Workflow, batch: pa.RecordBatch) -> float:
    block = _block(workflow, batch)
    start = time.perf_counter()
    workflow.encode_rows(workflow.apply(block))
    return time.perf_counter() - start


def _check_right(workflow: Workflow, on_device: DeviceTransform, batch: pa.RecordBatch) -> None:
    """Raise unless the device's batch is the CPU's; logarithms may differ in the last place of float32."""
    expected = workflow.encode_rows(workflow.apply(_block(workflow, batch)))
    keys = np.concatenate([np.asarray(column) for column in expected.keys])
    for _ in range(3):  # a GPU records the second transform and repeats the recording
        made = on_device(batch)
        np.testing.assert_array_equal(made.sparse.keys.cpu().numpy(), keys)
        np.testing.assert_array_equal(made.label.cpu().numpy(), expected.label)
        np.testing.assert_allclose(made.dense.cpu().numpy(), expected.dense, rtol=2**-23)


def _read_file(on_device: DeviceTransform, path: Path) -> None:
    for batch in pq.ParquetFile(path).iter_batches(_BATCH_ROWS):
        on_device(batch)
