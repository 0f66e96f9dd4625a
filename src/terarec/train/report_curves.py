"""The curves of a run's report, as SVG."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from terarec.errors import MissingDependencyError
from terarec.train.report_log import RunLog

Values = Sequence[float] | npt.NDArray[np.float64]

INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e8ec"
BLUE, PALE_BLUE, GREEN = "#2463b5", "#9dbde6", "#2a8a57"
SPLIT_COLORS = ("#d9622b", "#8a4fb0", "#a8871c")

_TITLES = {"auc": "AUC", "gauc": "GAUC", "rmse": "RMSE", "mae": "MAE", "mse": "MSE", "ne": "normalized entropy"}

MAX_POINTS = 400
"""Points drawn of a curve, about one per two pixels; longer logs are averaged down to it."""

MIN_SMOOTHED = 40
"""Points from which a loss curve gets a moving average beside it, over a twentieth of the points."""

_STYLE: Any = {
    "svg.fonttype": "path",
    "svg.hashsalt": "terarec",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
}


def draw_curves(log: RunLog, best_auc: float | None) -> list[tuple[str, str]]:
    """(caption, SVG) of loss, metrics and throughput over the samples seen; what was not logged is left out.

    Args:
        log: the run's log.
        best_auc: the AUC of the model that generated the labels, if known; drawn as a line.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise MissingDependencyError("the report needs matplotlib: pip install 'terarec[report]'") from error
    curves: list[tuple[str, str]] = []
    with mpl.rc_context(_STYLE):
        if log.training:
            curves.append(("Loss", _loss(log)))
        curves += [
            (metric_title(metric), _metric(log.evaluations, metric, best_auc))
            for metric in log.metrics
            if metric != "logloss"  # which is beside the loss
        ]
        if log.training:
            curves.append(("Throughput", _throughput(log.training)))
    return curves


def thin(values: Values, most: int = MAX_POINTS) -> npt.NDArray[np.float64]:
    """`values`, or at most `most` means of equally long runs of them."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) <= most:
        return array
    return np.array([part.mean() for part in np.array_split(array, most)])


def smooth(values: Values) -> npt.NDArray[np.float64]:
    """Moving average over a twentieth of the points, over fewer near the ends."""
    array = np.asarray(values, dtype=np.float64)
    half = len(array) // 40
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
    """What a metric is called for people."""
    return _TITLES.get(metric, metric)


def _metric(evaluations: Sequence[dict[str, Any]], metric: str, best_auc: float | None) -> str:
    figure, axes = _axes("area under the ROC curve" if metric == "auc" else metric_title(metric))
    _evaluation_lines(axes, evaluations, metric)
    last = next(point for point in reversed(evaluations) if metric in point)
    at = (last["samples"], last[metric])
    axes.annotate(f"{at[1]:.4f}", at, (0, 7), textcoords="offset points", horizontalalignment="right")
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
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("samples seen")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    return figure, axes


def _line(axes: Any, x: Values, y: Values, color: str, label: str, marker: str | None = None) -> None:
    """One curve; a single point shows as a dot, since a line of one point does not show at all."""
    mark = marker or ("o" if len(x) == 1 else None)
    axes.plot(thin(x), thin(y), color=color, label=label, marker=mark, markersize=4.5)


def _evaluation_lines(axes: Any, evaluations: Sequence[dict[str, Any]], name: str) -> None:
    splits = dict.fromkeys(point["split"] for point in evaluations)
    for split, color in zip(splits, itertools.cycle(SPLIT_COLORS), strict=False):
        points = [point for point in evaluations if point["split"] == split]
        _line(axes, *_series(points, name), color, split, marker="o")


def _series(points: Sequence[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    known = [point for point in points if name in point]
    return [point["samples"] for point in known], [point[name] for point in known]


def _svg(figure: Any, name: str) -> str:
    """The figure as an element to put into a page: no prolog, no metadata, ids that no other figure of it uses."""
    axes = figure.axes[0]
    axes.set_xlim(left=0)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=5)  # above the curves, never over them
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
