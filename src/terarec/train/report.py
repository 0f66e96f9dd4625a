"""The report of a run: one HTML file that needs nothing else."""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

import terarec
from terarec.checkpoint import whole
from terarec.checkpoint.layout import DENSE, WEIGHTS, parse_table_file
from terarec.config import load_run
from terarec.errors import FormatError
from terarec.formats import DATASET_FILE, read_dataset
from terarec.io import write_bytes
from terarec.spec import DatasetSpec, RunSpec, to_data
from terarec.train.report_curves import draw_curves, metric_title
from terarec.train.report_log import RunLog, read_log
from terarec.train.report_page import Facts, Grid, Page, Tile, render
from terarec.train.run_dir import RunDirectory

REPORT_FILE = "report.html"
MOST_TILES = 4
"""Metrics that the head of the report shows."""


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` of a run: curves, figures, model, data, tables, machine.

    Args:
        run_dir: a run with at least one logged point; the sizes come from its newest checkpoint, if there is one.

    Returns:
        The path of the file.

    Raises:
        FormatError: a file of the run is missing or damaged.
        MissingDependencyError: matplotlib is not installed.
    """
    directory = RunDirectory(run_dir)
    run = load_run(directory.run_file)
    dataset = read_dataset(directory.dataset)
    log = read_log(directory.metrics)
    newest = whole(directory.checkpoints)[-1:]
    sizes = {name: size for checkpoint in newest for name, size in _table_sizes(checkpoint).items()}
    page = Page(
        title=f"{_title(run)} on {dataset.name}",
        subtitle=f"terarec run in {run_dir.absolute().name}/",
        tiles=_tiles(log, dataset),
        curves=draw_curves(log, dataset.best_auc),
        evaluations=_evaluation_grid(log),
        facts=(
            Facts(title="Model", rows=[*_fields(run.model), *_parameter_rows(newest, sizes)]),
            Facts(title="Data", rows=_data_rows(run, dataset)),
            Facts(title="Training", rows=[*_optimizer_rows(run), *_fields(run.training)]),
            Facts(title="What it ran on", rows=[*_start_rows(log), *_machine_rows()]),
        ),
        tables=_table_grid(sizes),
    )
    path = run_dir / REPORT_FILE
    write_bytes(path, render(page).encode())
    return path


def _title(run: RunSpec) -> str:
    return {"dlrm": "DLRM", "wide_deep": "Wide & Deep"}.get(run.model.kind, run.model.kind)


def _tiles(log: RunLog, dataset: DatasetSpec) -> list[Tile]:
    tiles = []
    if log.evaluations:
        last = log.evaluations[-1]
        best = f"best reachable {dataset.best_auc:.4f}" if dataset.best_auc is not None else ""
        remarks = {"auc": best, "logloss": "nats per sample"}
        for metric in log.metrics[:MOST_TILES]:
            name = f"{metric_title(metric)}, {last['split']}"
            tiles.append(Tile(name=name, figure=_figure(last, metric, 4), remark=remarks.get(metric, "")))
    if log.training:
        last = log.training[-1]
        rate = statistics.median(point["samples_per_second"] for point in log.training)
        tiles.append(Tile(name="training", figure=f"{rate:,.0f}", remark="samples/s, median"))
        tiles.append(Tile(name="samples seen", figure=f"{last['samples']:,}", remark=f"in {last['step']:,} steps"))
        tiles.append(Tile(name="training time", figure=_duration(log.training_seconds)))
    return tiles


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _fields(spec: object) -> Iterator[tuple[str, str]]:
    """The fields of a spec for people."""
    for name, value in to_data(spec).items():
        yield name.replace("_", " "), _text(value)


def _text(value: object) -> str:
    """A value of `to_data` for people; a nested spec is its kind and its fields."""
    if isinstance(value, Mapping):
        words = [f"{name.replace('_', ' ')} {_inner(held)}" for name, held in value.items() if name != "kind"]
        return ", ".join([value["kind"], *words] if "kind" in value else words) or "none"
    if isinstance(value, list):
        is_sizes = all(isinstance(item, int) for item in value)
        return ("-" if is_sizes else ", ").join(map(_text, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _inner(value: object) -> str:
    """`_text` of what is a part of something, so that its commas are its own."""
    text = _text(value)
    return f"({text})" if ", " in text or (isinstance(value, Mapping) and value) else text


def _data_rows(run: RunSpec, dataset: DatasetSpec) -> list[tuple[str, str]]:
    rows = [("name", dataset.name), ("path", run.data), ("storage", dataset.storage)]
    rows += [("labels", ", ".join(column.name for column in dataset.labels))]
    rows += [("dense columns", str(len(dataset.dense))), ("categorical columns", str(len(dataset.categorical)))]
    if Path(run.data, DATASET_FILE).is_file():  # a run does not keep the shards, and outlives them
        data = read_dataset(Path(run.data))
        rows += [(f"{split} rows", f"{data.num_rows(split):,}") for split in data.splits]
    return rows


def _optimizer_rows(run: RunSpec) -> Iterator[tuple[str, str]]:
    for name, spec in (("dense optimizer", run.dense_optimizer), ("table optimizer", run.sparse_optimizer)):
        data = to_data(spec)
        rows = data.pop("rows", None)
        yield name, _text(data).replace("-", "\N{NON-BREAKING HYPHEN}")  # no line ends inside 1e-08
        if rows is not None:
            yield "table rows", _text(rows)


def _parameter_rows(newest: Sequence[Path], sizes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, str]]:
    for checkpoint in newest:
        dense = sum(math.prod(shape) for shape in _shapes(checkpoint / DENSE).values())
        yield "dense parameters", f"{dense:,}"
        in_tables = sum(rows * width for rows, width in sizes.values())
        yield "table parameters", f"{in_tables:,} ({_bytes(4 * in_tables)}) in {len(sizes)} tables"


def _table_sizes(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Table -> (rows, width)."""
    sizes: dict[str, tuple[int, int]] = {}
    for path in checkpoint.rglob("*"):
        parsed = parse_table_file(path.relative_to(checkpoint).as_posix())
        if parsed is not None:
            rows, width = _shapes(path)[WEIGHTS]
            sizes[parsed[0]] = (sizes.get(parsed[0], (0, 0))[0] + rows, width)
    return sizes


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the floating-point tensors in a container, from its header."""
    try:
        with safe_open(path, framework="numpy") as container:
            slices = {name: container.get_slice(name) for name in container.keys()}  # noqa: SIM118
            return {name: tuple(s.get_shape()) for name, s in slices.items() if s.get_dtype() in ("F64", "F32", "F16")}
    except SafetensorError as error:
        raise FormatError(f"{path}: damaged: {error}") from None


def _evaluation_grid(log: RunLog) -> Grid:
    names = log.metrics
    rows = [
        (
            point["split"],
            f"{point['step']:,}",
            f"{point['samples']:,}",
            *(_figure(point, name) for name in names),
        )
        for point in log.evaluations
    ]
    header = ("split", "step", "samples seen", *map(metric_title, names))
    return Grid(title="Evaluations", header=header, rows=rows)


def _figure(point: Mapping[str, Any], name: str, digits: int = 5) -> str:
    return f"{point[name]:.{digits}f}" if name in point else "-"


def _table_grid(sizes: Mapping[str, tuple[int, int]]) -> Grid:
    by_size = sorted(sizes.items(), key=lambda item: -item[1][0] * item[1][1])
    rows = [(name, f"{rows:,}", str(width), _bytes(4 * rows * width)) for name, (rows, width) in by_size]
    return Grid(title="Embedding tables", header=("table", "rows", "width", "weights"), rows=rows)


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _start_rows(log: RunLog) -> Iterator[tuple[str, str]]:
    """What the training ran on; of several starts that differ, all in their order."""
    for name in ("device", "threads", "precision", "compile"):
        held = dict.fromkeys(_text(start[name]) for start in log.starts if name in start)
        if held:
            yield name.replace("threads", "CPU threads").replace("compile", "torch.compile"), ", then ".join(held)
    kernels = log.starts[-1].get("kernels", {}) if log.starts else {}
    for implementation in dict.fromkeys(kernels.values()):
        operations = [op for op, used in kernels.items() if used == implementation]
        yield f"kernels: {implementation}", ", ".join(operations)


def _machine_rows() -> list[tuple[str, str]]:
    rows = [
        ("processor", _processor()),
        ("cores", str(os.cpu_count())),
    ]
    rows += [("system", platform.platform(terse=True)), ("Python", platform.python_version())]
    rows += [("terarec", terarec.__version__), ("torch", torch.__version__)]
    return rows + [(name, version(name)) for name in ("numpy", "pyarrow")]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M) if cpuinfo.is_file() else None
    return match[1] if match else platform.processor() or platform.machine()
