# SPDX-License-Identifier: Apache-2.0
"""The report of a run: its content, that it needs no other file, and errors of damaged logs."""

import dataclasses
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from terarec.config import save_run
from terarec.errors import DataNotFoundError, FormatError, MissingDependencyError
from terarec.formats import write_dataset
from terarec.reports.text import byte_text
from terarec.spec import (
    AdamSpec,
    BinarySpec,
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DLRMSpec,
    DynamicTablesSpec,
    LabelColumn,
    RowOptions,
    RunSpec,
    StaticTablesSpec,
    TrainingSpec,
    freq,
    lru,
)
from terarec.spec.tables import RowType
from terarec.train.metrics_log import RunLog, read_log
from terarec.train.report import MAX_POINTS, draw_curves, smooth, thin, write_report
from terarec.train.run import build
from tests.errors import at
from tests.train.planted import make_labelled
from tests.train.small_run import changed

POINTS = [
    {"step": 10, "samples": 1000, "seconds": 1.0, "loss": 0.69, "samples_per_second": 1000.0},
    {"step": 20, "samples": 2000, "seconds": 2.0, "loss": 0.51, "samples_per_second": 1200.0},
    {"step": 20, "samples": 2000, "split": "valid", "auc": 0.71234, "logloss": 0.54321},
]


def make_run(path: Path, points: list[dict], *, best_auc: float | None = None, name: str = "clicks") -> Path:
    (path / "dataset").mkdir(parents=True)
    dataset = DatasetSpec(
        name=name,
        storage="parquet",
        labels=(LabelColumn(name="label"),),
        dense=(DenseColumn(name="I1"),),
        categorical=(CategoricalColumn(name="C1", rows=10),),
        best_auc=best_auc,
    )
    write_dataset(dataset, path / "dataset")
    save_run(RunSpec(data=str(path / "data")), path / "run.json")
    (path / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    return path


def svgs(page: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)


def test_the_report_shows_figures_and_three_curves(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "run", POINTS, best_auc=0.7654))
    page = path.read_text()
    assert path == tmp_path / "run" / "report.html"
    assert re.findall(r"<figure[^>]*><h2>(.*?)</h2>", page) == ["Loss", "AUC", "Throughput"]
    assert len(svgs(page)) == 3
    for text in (
        "DLRM on clicks",
        "0.7123",
        "best reachable 0.7654",
        "0.54321",
        "1,100",
        "2,000",
        "in 20 steps",
        "2.0 s",
    ):
        assert text in page


def test_the_metric_that_chose_the_served_step_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best one by ``auc/click`` stood beside a higher mean, without a word why."""
    labels = [
        {"click": {"rows": 9, "metrics": {"auc": auc}}, "buy": {"rows": 9, "metrics": {"auc": 0.6}}}
        for auc in (0.81357, 0.79)
    ]
    points = [
        {"step": step, "samples": 50 * step, "split": "valid", "auc": auc, "seconds": 1.0, "labels": of_label}
        for step, auc, of_label in zip((10, 20), (0.70, 0.72), labels, strict=True)
    ]
    run = make_run(tmp_path / "run", [*POINTS[:2], *points])
    save_run(RunSpec(data=str(tmp_path / "data"), training=TrainingSpec(monitor="auc/click")), run / "run.json")
    monkeypatch.setattr("terarec.train.report._served", lambda _directory, _run, log: log.evaluations[0])
    page = write_report(run).read_text()
    assert "the best of 2 evaluations by AUC of click" in page
    assert "AUC of click, valid" in page
    assert re.search(r"<th[^>]*>AUC of click</th>.*?0\.81357.*?0\.79000", page, flags=re.DOTALL)
    assert re.findall(r"<figure[^>]*><h2>(.*?)</h2>", page) == ["Loss", "AUC of click", "AUC", "Throughput"]
    # The tables of labels have the metric's own column.
    assert page.count(">AUC of click</th>") == 1


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_report_of_a_trained_run_shows_its_sizes(
    spec: RunSpec, tmp_path: Path, dtype: RowType, item_bytes: int
) -> None:
    model = dataclasses.replace(spec.model, tables=StaticTablesSpec(dtype=dtype))
    run = build(dataclasses.replace(spec, model=model), tmp_path / "run")
    run.fit()
    page = write_report(tmp_path / "run").read_text()
    dense = sum(parameter.numel() for parameter in run.model.parameters())
    in_tables = sum(4 * column.rows for column in run.dataset.categorical)
    assert f"<td>dense parameters</td><td>{dense:,}</td>" in page
    table_bytes = byte_text(item_bytes * in_tables)
    assert f"<td>table parameters</td><td>{in_tables:,} ({table_bytes})" in page
    assert f" in {len(run.dataset.categorical)} tables</td>" in page
    for column in run.dataset.categorical:
        assert f'<td>{column.name}</td><td class="n">{column.rows:,}</td><td class="n">4</td>' in page
    assert "<td>train rows</td><td>1,000</td>" in page
    assert re.findall(r"<figure[^>]*><h2>([A-Za-z]*)", page) == ["Loss", "AUC", "Throughput", "Calibration"]


def test_nested_settings_read_as_words(spec: RunSpec, tmp_path: Path) -> None:
    """C1: options of rows ended a finished training in a TypeError. E4: dicts and zeros were shown."""
    run = make_run(tmp_path / "run", POINTS)
    tables = DynamicTablesSpec(admit=freq(3), evict=lru(), max_rows=1000)
    rows = RowOptions(mode="global", l2=0.05, clip_norm=2.0, table_lr={"a": 0.5, "b": 1.0}, frozen=("c", "d"))
    save_run(
        dataclasses.replace(spec, model=DLRMSpec(tables=tables), sparse_optimizer=AdamSpec(rows=rows)), run / "run.json"
    )
    facts = dict(re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td></tr>", write_report(run).read_text()))
    assert facts["tables"].startswith("dynamic, ")
    assert "admit (freq, count 3)" in facts["tables"]
    assert facts["table optimizer"] == "adam, lr 0.001, beta1 0.9, beta2 0.999, eps 1e\u201108, eps hat no"
    assert "mode global, l1 0, l2 0.05, clip norm 2" in facts["table rows"]
    assert "table lr (a 0.5, b 1), frozen (c, d)" in facts["table rows"]
    assert not [value for value in facts.values() if "{" in value or "None" in value]


def test_the_ticks_of_a_narrow_curve_differ() -> None:
    """E4: .720 .721 .721 .722 .722."""
    points = [{"samples": n, "auc": 0.72 + n * 1e-4, "split": "valid"} for n in range(20)]
    (plot,) = draw_curves(RunLog(training=(), evaluations=points), None)
    svg = plot.svg
    labels = re.findall(r">(0\.\d+)</text>", svg.split("auc-matplotlib.axis_2")[1].split("area under")[0])
    assert len(labels) == len(set(labels)) > 2


def test_the_report_fetches_nothing(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run", POINTS)).read_text()
    assert not re.search(r"<script|<link|<img|@import|src=|url\((?!#)|href=\"(?!#)", page)


def test_the_curves_are_well_formed_and_share_no_id(tmp_path: Path) -> None:
    curves = svgs(write_report(make_run(tmp_path / "run", POINTS, best_auc=0.8)).read_text())
    seen: set[str] = set()
    for curve in curves:
        ids = {element.get("id") for element in ElementTree.fromstring(curve).iter() if element.get("id")}
        used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', curve))
        assert ids
        assert used <= ids
        assert not ids & seen
        seen |= ids


def test_the_same_log_gives_the_same_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", POINTS)
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_what_was_not_logged_is_left_out(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run", POINTS[:1])).read_text()
    assert re.findall(r"<figure[^>]*><h2>(.*?)</h2>", page) == ["Loss", "Throughput"]
    assert "best reachable" not in page
    assert "Evaluations" not in page


def test_an_empty_log_still_describes_the_run(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run", [])).read_text()
    assert not svgs(page)
    assert "categorical columns" in page


def test_after_a_resume_the_later_line_of_a_step_counts(tmp_path: Path) -> None:
    again = [{**POINTS[2], "auc": 0.81111}]
    page = write_report(make_run(tmp_path / "run", POINTS + again)).read_text()
    assert "0.81111" in page
    assert "0.71234" not in page


def test_evaluations_of_a_step_are_in_the_order_of_their_last_lines(tmp_path: Path) -> None:
    """The last line of a run is of its last split: a step that was scored by another in between is scored again."""
    lines = [
        {**POINTS[2], "split": split, "auc": auc} for split, auc in (("valid", 0.5), ("test", 0.6), ("valid", 0.7))
    ]
    log = read_log(make_run(tmp_path / "run", lines) / "metrics.jsonl")
    assert [(point["split"], point["auc"]) for point in log.evaluations] == [("test", 0.6), ("valid", 0.7)]


def test_training_time_adds_up_over_resumes(tmp_path: Path) -> None:
    starts = [{"step": step, "samples": 100 * step, "device": "cpu", "threads": 1} for step in (0, 20, 40)]
    clocks = [(30, 1.5), (40, 3.5), (50, 3.75)]  # a later start may have a later clock
    later = [{**POINTS[1], "step": step, "seconds": seconds} for step, seconds in clocks]
    points = [starts[0], *POINTS, starts[1], *later[:2], starts[2], later[2]]
    page = write_report(make_run(tmp_path / "run", points)).read_text()
    assert "9.2 s" in page  # 2 + 3.5 + 3.75


def test_an_evaluation_without_auc_shows_the_rest(tmp_path: Path) -> None:
    one_class = {"step": 20, "samples": 2000, "split": "valid", "logloss": 0.33333}
    page = write_report(make_run(tmp_path / "run", [*POINTS[:2], one_class])).read_text()
    assert re.findall(r"<figure[^>]*><h2>(.*?)</h2>", page) == ["Loss", "Throughput"]
    assert "0.33333" in page


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run", POINTS, name="<b>&x")).read_text()
    assert "<b>&x" not in page
    assert "DLRM on &lt;b&gt;&amp;x" in page


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ('{"step": 30,', ("line 4 column 13", "Expecting property name")),
        ("[]", ("line 4", "got '[]'")),
        ('{"step": 30}', ("line 4", "got '{\"step\": 30}'")),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, place: tuple[str, str]) -> None:
    run = make_run(tmp_path / "run", POINTS)
    with (run / "metrics.jsonl").open("a") as log:
        log.write(line + "\n")
    with pytest.raises(FormatError, check=at(f"{run}/metrics.jsonl: {place[0]}", place[1])):
        write_report(run)
    assert not (run / "report.html").exists()


def test_a_run_without_log_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", POINTS)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(DataNotFoundError, check=at(f"{run}/metrics.jsonl")):
        write_report(run)


def test_a_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", POINTS)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, check=at("matplotlib", "terarec[report]")):
        write_report(run)


def test_long_curves_are_averaged_down() -> None:
    values = np.arange(10 * MAX_POINTS, dtype=np.float64)
    thinned = thin(values)
    assert len(thinned) == MAX_POINTS
    assert thinned[0] == values[:10].mean()
    assert thinned[-1] == values[-10:].mean()
    assert thin([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_smoothing_keeps_a_level_and_averages_its_window() -> None:
    assert np.allclose(smooth([2.0] * 80), 2.0)
    values = np.random.default_rng(0).normal(size=80)
    assert smooth(values)[40] == pytest.approx(values[38:43].mean())
    assert smooth(values)[0] == pytest.approx(values[:3].mean())


def rows_of(page: str, title: str) -> list[list[str]]:
    """Return the texts of the cells of the table with this title."""
    (table,) = re.findall(rf"<h2>{re.escape(title)}</h2><div class=\"scroll\">(.*?)</table>", page, flags=re.DOTALL)
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, flags=re.DOTALL) for row in table.split("<tr>")[1:]]
    return [[re.sub(r"<[^>]*>", "", cell).strip() for cell in row] for row in rows]


def test_a_run_that_stopped_early_shows_the_step_that_is_served(tmp_path: Path, spec: RunSpec) -> None:
    """Finding P4: the head of the report had the last evaluation, whichever step is served."""
    run = build(changed(spec, epochs=9, patience=1, min_delta=0.5, eval_every=3, keep_checkpoints=1), tmp_path)
    report = run.fit()
    assert report.served_step == report.best_step
    page = write_report(tmp_path).read_text()
    tiles = dict(re.findall(r'class="card tile"><span>(.*?)</span><b>(.*?)</b>', page))
    assert tiles["AUC, valid"] == f"{report.metrics['auc']:.4f}"
    assert tiles["served step"] == str(report.best_step)
    assert [row[1] for row in rows_of(page, "Evaluations") if "served" in row[1]] == [f"{report.best_step} served"]


def test_labels_slices_and_calibration_are_those_of_the_served_step(tmp_path: Path, spec: RunSpec) -> None:
    """Finding P5: the report had none of them."""
    rng = np.random.default_rng(0)
    labels = {s: {name: rng.integers(0, 2, 300) for name in ("click", "noise")} for s in ("train", "valid")}
    make_labelled(tmp_path / "data", labels)
    weights = BinarySpec(label_weights=(1.0, 0.0))
    spec = dataclasses.replace(changed(spec, slices=("user",)), data=str(tmp_path / "data"), objective=weights)
    evaluation = build(spec, tmp_path / "run", names=lambda column, ids: [f"{column} {number}" for number in ids])
    found = evaluation.fit().evaluation
    page = write_report(tmp_path / "run").read_text()
    of_labels = found.results.overall.labels
    assert rows_of(page, "Labels of the served step")[1:] == [
        [name, "300", *(f"{of_labels[label].values[metric]:.5f}" for metric in ("auc", "logloss"))]
        for label, name in (("click", "click"), ("noise", "noise (weight 0, not in the mean)"))
    ]
    values = found.results.slices["user"].values
    (title,) = re.findall("<h2>(Slices by user.*?)</h2>", page)
    assert title.endswith(f"the largest of {len(values)}")
    assert [row[0] for row in rows_of(page, title)[1:]] == [one.value for one in values[:20]]
    assert str(values[0].value).startswith("user ")
    for label, of_label in of_labels.items():
        assert f"Calibration of {label}" in page
        assert f"ECE {of_label.calibration.error:.4f}" in page


def test_every_colour_of_a_page_has_its_dark_form(tmp_path: Path) -> None:
    """Finding P5: pages were light in a dark browser; plots take the colours of the page."""
    page = write_report(make_run(tmp_path / "run", POINTS)).read_text()
    light, dark = (set(re.findall(r"(--[a-z-]+):", block)) for block in re.findall(r":root \{(.*?)\}", page, re.DOTALL))
    assert "@media (prefers-color-scheme: dark)" in page
    assert light == dark >= set(re.findall(r"var\((--[a-z-]+)\)", page))
    rules = re.sub(r":root \{.*?\}", "", page, flags=re.DOTALL)
    assert re.findall(r"(?:fill|stroke|color|background): ?#[0-9a-f]{3,6}", rules) == []
