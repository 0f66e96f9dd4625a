# SPDX-License-Identifier: Apache-2.0
"""The report of a run: one self-contained HTML file."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import platform
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

import terarec
from terarec.checkpoint.directory import (
    DENSE,
    TABLE_PIECES,
    WEIGHTS,
    complete_checkpoints,
    newest_checkpoint,
    read_chain,
    step_of,
)
from terarec.checkpoint.table_chain import TableChain
from terarec.checkpoint.table_files import TableFiles
from terarec.config import load_run
from terarec.errors import FormatError
from terarec.formats import read_dataset
from terarec.formats.dataset import DATASET_FILE
from terarec.io.files import write_bytes
from terarec.io.opening import link, open_file
from terarec.kernels.processor import processor_name
from terarec.memory.fast_tier import TierUse
from terarec.models.artifact import find_checkpoint
from terarec.reports.page import (
    BLUE,
    GREEN,
    MUTED,
    OCHRE,
    ORANGE,
    PALE_BLUE,
    PURPLE,
    Badge,
    Facts,
    Grid,
    Page,
    Plot,
    Row,
    Tile,
    new_axes,
    plot_style,
    render,
    svg_element,
)
from terarec.reports.text import byte_text, duration_text, setting_text
from terarec.spec import DatasetSpec, RunSpec, to_data
from terarec.train.metrics_log import RunLog, read_log
from terarec.train.run_dir import RunDirectory

REPORT_PAGE = "report.html"
MOST_TILES = 4
"""Metrics that the head of the report shows."""
MOST_SLICES = 20
"""Values of a column that the report shows; the log has all."""
MOST_CURVES = 6
"""Labels whose calibration is drawn."""


Curve = Sequence[float] | npt.NDArray[np.float64]

SPLIT_COLORS = (ORANGE, PURPLE, OCHRE)

_TITLES = {
    "auc": "AUC",
    "gauc": "GAUC",
    "rmse": "RMSE",
    "mae": "MAE",
    "mse": "MSE",
    "ece": "ECE",
    "ne": "normalized entropy",
}

MAX_POINTS = 400
"""Points drawn of a curve, about one per two pixels; longer logs are averaged down to it."""

MIN_SMOOTHED = 40
"""Points from which a loss curve gets a moving average, over a twentieth of the points."""


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` of a run: curves, figures, model, data, tables, machine.

    Args:
        run_dir: Run with at least one logged point; the sizes come from its newest checkpoint, if there is one.

    Returns:
        The path of the file.
    """
    directory = RunDirectory(run_dir)
    run = load_run(directory.run_file)
    dataset = read_dataset(directory.dataset)
    logged = read_log(directory.metrics)
    log = _with_monitor(logged, run.training.monitor)
    newest = newest_checkpoint(directory.checkpoints)
    sizes = {} if newest is None else _table_sizes(newest)
    served = _served(directory, run, log)
    page = Page(
        title=f"{_title(run)} on {dataset.name}",
        subtitle=f"terarec run in {run_dir.absolute().name}/",
        rows=(
            Row(width="narrow", cards=_tiles(log, run, dataset, served)),
            Row(
                width="medium",
                cards=[
                    *draw_curves(log, dataset.best_auc, served=served),
                    *_calibration_plots(served),
                    _evaluation_grid(log, served),
                    _label_grid(logged, served),
                    *_slice_grids(logged, served),
                ],
            ),
            Row(
                width="medium",
                cards=(
                    Facts(title="Model", rows=[*_fields(run.model), *_parameter_rows(newest, sizes)]),
                    Facts(title="Data", rows=_data_rows(run, dataset)),
                    Facts(title="Training", rows=[*_optimizer_rows(run), *_fields(run.training)]),
                    Facts(title="What it ran on", rows=[*_start_rows(log), *_tier_rows(log), *_machine_rows()]),
                ),
            ),
            Row(width="wide", cards=[_table_grid(sizes)]),
        ),
    )
    path = run_dir / REPORT_PAGE
    write_bytes(path, render(page).encode())
    return path


def _title(run: RunSpec) -> str:
    return {"dlrm": "DLRM", "wide_deep": "Wide & Deep"}.get(run.model.kind, run.model.kind)


def _served(directory: RunDirectory, run: RunSpec, log: RunLog) -> Mapping[str, Any]:
    """Return the evaluation of the checkpoint that serving loads; the last one without it, empty without any."""
    if not complete_checkpoints(directory.checkpoints):
        return log.evaluations[-1] if log.evaluations else {}
    step = step_of(find_checkpoint(directory.path, run))
    return next((point for point in reversed(log.evaluations) if point["step"] == step), {})


def _with_monitor(log: RunLog, monitor: str | None) -> RunLog:
    """Return the log with a monitor such as ``auc/LABEL`` first among the metrics: it chose the served step."""
    metric, _, label = (monitor or "").partition("/")
    if monitor is None or not label:
        return log
    evaluations = []
    for point in log.evaluations:
        of_label = point.get("labels", {}).get(label, {}).get("metrics", {})
        evaluations.append({monitor: of_label[metric], **point} if metric in of_label else point)
    return dataclasses.replace(log, evaluations=evaluations)


def _tiles(log: RunLog, run: RunSpec, dataset: DatasetSpec, served: Mapping[str, Any]) -> list[Tile]:
    tiles = []
    if served:
        best = f"best reachable {dataset.best_auc:.4f}" if dataset.best_auc is not None else ""
        remarks = {"auc": best, "logloss": "nats per sample"}
        for metric in log.metrics[:MOST_TILES]:
            name = f"{metric_title(metric)}, {served['split']}"
            tiles.append(Tile(name=name, figure=_figure(served, metric, 4), remark=remarks.get(metric, "")))
        is_last = served is log.evaluations[-1]
        monitor = run.training.monitor or log.metrics[0]
        best = f"the best of {len(log.evaluations)} evaluations by {metric_title(monitor)}"
        remark = "the last one" if is_last else best
        tiles.append(Tile(name="served step", figure=f"{served['step']:,}", remark=remark))
    if log.training:
        last = log.training[-1]
        # Single points, such as the first one, are slower than the training, and would pull a mean down.
        rate = statistics.median(point["samples_per_second"] for point in log.training)
        tiles.append(Tile(name="training", figure=f"{rate:,.0f}", remark="samples/s, median"))
        tiles.append(Tile(name="samples seen", figure=f"{last['samples']:,}", remark=f"in {last['step']:,} steps"))
        tiles.append(Tile(name="training time", figure=duration_text(log.training_seconds)))
    return tiles


def _fields(spec: object) -> Iterator[tuple[str, str]]:
    """Yield the fields of a spec for people."""
    for name, value in to_data(spec).items():
        yield name.replace("_", " "), setting_text(value)


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
        yield name, setting_text(data).replace("-", "\N{NON-BREAKING HYPHEN}")  # no line ends inside 1e-08
        if rows is not None:
            yield "table rows", setting_text(rows)


def _parameter_rows(newest: Path | None, sizes: Mapping[str, _TableSize]) -> Iterator[tuple[str, str]]:
    if newest is None:
        return
    dense = sum(math.prod(shape) for shape, _ in _float_tensors(newest / DENSE).values())
    yield "dense parameters", f"{dense:,}"
    in_tables = sum(size.rows * size.width for size in sizes.values())
    num_bytes = sum(size.num_bytes for size in sizes.values())
    yield "table parameters", f"{in_tables:,} ({byte_text(num_bytes)}) in {len(sizes)} tables"


class _TableSize(NamedTuple):
    rows: int
    width: int
    row_bytes: int  # of the weights alone

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes


def _table_sizes(checkpoint: Path) -> dict[str, _TableSize]:
    sizes: dict[str, _TableSize] = {}
    chain = read_chain(checkpoint)
    base, manifest = chain[0]
    for entry in manifest.files:
        parsed = TABLE_PIECES.parse(entry.file)
        tensors = {} if parsed is None else _float_tensors(base / entry.file)
        if parsed is not None and WEIGHTS in tensors:  # of a table in a row file there are keys alone
            (rows, width), item_bytes = tensors[WEIGHTS]
            before = sizes[parsed[0]].rows if parsed[0] in sizes else 0
            sizes[parsed[0]] = _TableSize(before + rows, width, width * item_bytes)
    sizes |= {name: _TableSize(*size) for name, size in TableFiles(base, manifest).row_file_sizes().items()}
    return sizes | {
        name: sizes[name]._replace(rows=rows) for name, rows in TableChain(chain).rows_after_delta().items()
    }


_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def _float_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return the shape and the bytes of an element of each floating-point tensor in a container, from its header."""
    try:
        with open_file(path) as file, safe_open(link(file.fileno(), path), framework="numpy") as container:
            slices = {name: container.get_slice(name) for name in container.keys()}  # noqa: SIM118
            return {
                name: (tuple(tensor.get_shape()), _FLOAT_BYTES[tensor.get_dtype()])
                for name, tensor in slices.items()
                if tensor.get_dtype() in _FLOAT_BYTES
            }
    except SafetensorError as error:
        raise FormatError(path, f"damaged: {error}") from None


def _evaluation_grid(log: RunLog, served: Mapping[str, Any]) -> Grid:
    names = log.metrics
    rows = [
        (
            point["split"],
            Badge(text=f"{point['step']:,} served", level="good") if point is served else f"{point['step']:,}",
            *(_figure(point, name) for name in names),
            f"{point['samples']:,}",
        )
        for point in log.evaluations
    ]
    # The metrics first: on a phone the last columns are off the screen until the table is scrolled.
    header = ("split", "step", *map(metric_title, names), "samples seen")
    return Grid(title="Evaluations", header=header, rows=rows)


def _label_grid(log: RunLog, served: Mapping[str, Any]) -> Grid:
    untrained = served.get("untrained_labels", ())
    rows = [
        (f"{name} (weight 0, not in the mean)" if name in untrained else name, *_metrics_of(label, log.metrics))
        for name, label in served.get("labels", {}).items()
    ]
    return Grid(title="Labels of the served step", header=_header("label", log.metrics), rows=rows)


def _slice_grids(log: RunLog, served: Mapping[str, Any]) -> list[Grid]:
    grids = []
    for column, slices_of_column in served.get("slices", {}).items():
        values, other = slices_of_column["values"], slices_of_column["other"]
        rows = [
            ("(missing)" if one["value"] is None else str(one["value"]), *_metrics_of(one, log.metrics))
            for one in values[:MOST_SLICES]
        ]
        left_out = len(values) - len(rows) + (0 if other is None else other["distinct_values"])
        title = f"Slices by {column}" + (f", the largest of {len(rows) + left_out:,}" if left_out else "")
        grids.append(Grid(title=title, header=_header("value", log.metrics), rows=rows))
    return grids


def _header(first: str, metrics: Sequence[str]) -> tuple[str, ...]:
    return first, "rows", *map(metric_title, metrics)


def _metrics_of(values: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    """Return the cells of the samples of a label or a slice."""
    return [f"{values['rows']:,}", *(_figure(values["metrics"], name) for name in metrics)]


def _calibration_plots(served: Mapping[str, Any]) -> list[Plot]:
    """Draw the mean label by the mean score of each bin, for the first labels."""
    plots = []
    curves: Mapping[str, Any] = served.get("calibration", {})
    with plot_style():
        for number, (label, curve) in enumerate(list(curves.items())[:MOST_CURVES]):
            if not curve["score"]:
                continue
            figure, axes = new_axes(3.4)
            end = 1.05 * max(*curve["score"], *curve["label"])
            axes.plot([0, end], [0, end], color=MUTED, linewidth=1.2, linestyle=(0, (5, 3)), label="calibrated")
            axes.plot(curve["score"], curve["label"], color=ORANGE, marker="o", markersize=4.5, label=served["split"])
            axes.set_xlabel("mean score of a bin")
            axes.set_ylabel("mean label")
            axes.set_ylim(bottom=0)
            title = "Calibration" if len(curves) == 1 else f"Calibration of {label}"
            badge = Badge(text=f"ECE {curve['ece']:.4f}")
            plots.append(Plot(title=title, svg=_svg(figure, f"calibration{number}"), badge=badge))
    return plots


def _figure(point: Mapping[str, Any], name: str, digits: int = 5) -> str:
    if name not in point:
        return "-"
    return "undefined" if point[name] is None else f"{point[name]:.{digits}f}"


def _table_grid(sizes: Mapping[str, _TableSize]) -> Grid:
    by_size = sorted(sizes.items(), key=lambda item: -item[1].num_bytes)
    rows = [(name, f"{size.rows:,}", str(size.width), byte_text(size.num_bytes)) for name, size in by_size]
    return Grid(title="Embedding tables", header=("table", "rows", "width", "weights"), rows=rows)


def _start_rows(log: RunLog) -> Iterator[tuple[str, str]]:
    """Yield the hardware and software of the training, for each different start in order."""
    for name in ("device", "threads", "precision", "compile"):
        texts = dict.fromkeys(setting_text(start[name]) for start in log.starts if name in start)
        if texts:
            yield name.replace("threads", "CPU threads").replace("compile", "torch.compile"), ", then ".join(texts)
    kernels = log.starts[-1].get("kernels", {}) if log.starts else {}
    for implementation in dict.fromkeys(kernels.values()):
        operations = [op for op, used in kernels.items() if used == implementation]
        yield f"kernels: {implementation}", ", ".join(operations)


def _tier_rows(log: RunLog) -> Iterator[tuple[str, str]]:
    if log.tiers:
        total = {name: sum(uses.get(name, 0) for uses in log.tiers) for name in TierUse._fields}
        use = TierUse(**total)
        read, written = byte_text(use.bytes_read), byte_text(use.bytes_written)
        yield "rows in the fastest tier", f"{use.hit_rate:.1%} of the rows that batches needed"
        yield "rows read from slower tiers", f"{use.rows_read:,} ({read}), {use.staged:,} of them ahead"
        yield "rows written to slower tiers", f"{use.rows_written:,} ({written})"


def _machine_rows() -> list[tuple[str, str]]:
    rows = [
        ("processor", processor_name()),
        ("cores", str(os.cpu_count())),
    ]
    rows += [("system", platform.platform(terse=True)), ("Python", platform.python_version())]
    rows += [("terarec", terarec.__version__), ("torch", torch.__version__)]
    return rows + [(name, version(name)) for name in ("numpy", "pyarrow")]


def draw_curves(log: RunLog, best_auc: float | None, *, served: Mapping[str, Any] = MappingProxyType({})) -> list[Plot]:
    """Draw the logged loss, metrics and throughput by the number of samples.

    Args:
        log: Log of the run.
        best_auc: AUC of the model that generated the labels, if known; drawn as a line.
        served: Evaluation of the checkpoint that serving loads, which is marked unless it is the last one.
    """
    curves: list[Plot] = []
    with plot_style():
        if log.training:
            curves.append(Plot(title="Loss", svg=_loss(log)))
        curves += [
            Plot(title=metric_title(metric), svg=_metric(log.evaluations, metric, best_auc, served))
            for metric in log.metrics
            # The logloss is next to the loss; a metric that never had a value has no curve.
            if metric != "logloss" and _series(log.evaluations, metric)[0]
        ]
        if log.training:
            curves.append(Plot(title="Throughput", svg=_throughput(log.training)))
    return curves


def thin(values: Curve) -> npt.NDArray[np.float64]:
    """Return `values`, or at most `MAX_POINTS` means of equally long runs of them."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) <= MAX_POINTS:
        return array
    return np.array([part.mean() for part in np.array_split(array, MAX_POINTS)])


def smooth(values: Curve) -> npt.NDArray[np.float64]:
    """Return the moving average over a twentieth of the points, over fewer near the ends."""
    array = np.asarray(values, dtype=np.float64)
    half = len(array) // 40
    # By sums up to each point, since windows near the ends are shorter, which a convolution would pad.
    sums = np.concatenate([[0.0], np.cumsum(array)])
    index = np.arange(len(array))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(array))
    means: npt.NDArray[np.float64] = (sums[high] - sums[low]) / (high - low)
    return means


def _loss(log: RunLog) -> str:
    figure, axes = _axes("loss (nats per sample)" if "logloss" in log.metrics else "loss")
    samples, losses = _series(log.training, "loss")
    smoothed = len(losses) >= MIN_SMOOTHED
    _line(axes, samples, losses, PALE_BLUE if smoothed else BLUE, "train")
    if smoothed:
        _line(axes, samples, smooth(losses), BLUE, "train, smoothed")
    _evaluation_lines(axes, log.evaluations, "logloss")
    return _svg(figure, "loss")


def metric_title(metric: str) -> str:
    """Return the title of a metric, or of ``metric/LABEL``."""
    name, _, label = metric.partition("/")
    title = _TITLES.get(name, name)
    return f"{title} of {label}" if label else title


def _metric(
    evaluations: Sequence[dict[str, Any]], metric: str, best_auc: float | None, served: Mapping[str, Any]
) -> str:
    figure, axes = _axes("area under the ROC curve" if metric == "auc" else metric_title(metric))
    _evaluation_lines(axes, evaluations, metric)
    samples, values = _series(evaluations, metric)
    at = (samples[-1], values[-1])
    if served.get(metric) is not None and served["step"] != evaluations[-1]["step"]:
        at = (served["samples"], served[metric])
        axes.plot(*at, color=GREEN, marker="o", markersize=10, fillstyle="none", linestyle="none", label="served")
    axes.annotate(f"{at[1]:.4f}", at, (0, 9), textcoords="offset points", horizontalalignment="right")
    if metric == "auc" and best_auc is not None:
        axes.axhline(
            best_auc, color=GREEN, linewidth=1.4, linestyle=(0, (5, 3)), label=f"best reachable {best_auc:.4f}"
        )
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)  # as many digits as keep the labels apart
    axes.margins(y=0.15)
    return _svg(figure, re.sub(r"\W", "_", metric))


def _throughput(training: Sequence[dict[str, Any]]) -> str:
    from matplotlib.ticker import EngFormatter

    figure, axes = _axes("samples per second")
    samples, rates = _series(training, "samples_per_second")
    _line(axes, samples, rates, BLUE, "train")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylim(bottom=0, top=1.15 * max(rates, default=1.0))
    return _svg(figure, "throughput")


def _axes(unit: str) -> tuple[Any, Any]:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure, axes = new_axes(3.4)
    axes.set_xlabel("samples seen")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    return figure, axes


def _line(axes: Any, x: Curve, y: Curve, color: str, label: str, marker: str | None = None) -> None:
    """Draw a curve; a single point as a dot, since a line of one point is invisible."""
    mark = marker or ("o" if len(x) == 1 else None)
    axes.plot(thin(x), thin(y), color=color, label=label, marker=mark, markersize=4.5)


def _evaluation_lines(axes: Any, evaluations: Sequence[dict[str, Any]], name: str) -> None:
    splits = dict.fromkeys(point["split"] for point in evaluations)
    for split, color in zip(splits, itertools.cycle(SPLIT_COLORS), strict=False):
        points = [point for point in evaluations if point["split"] == split]
        _line(axes, *_series(points, name), color, split, marker="o")


def _series(points: Sequence[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    known = [point for point in points if point.get(name) is not None]
    return [point["samples"] for point in known], [point[name] for point in known]


def _svg(figure: Any, name: str) -> str:
    """Return the figure as an element with a legend above the curves."""
    axes = figure.axes[0]
    axes.set_xlim(left=0)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=5)  # above the curves, never over them
    return svg_element(figure, name)
