# SPDX-License-Identifier: Apache-2.0
"""Rewrite the tables of docs/accuracy.md from the recipes and the newest rows of results/accuracy*.csv.

Run it after `accuracy.py`: ``python benchmarks/accuracy_page.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from marked_page import Found, MarkedPage

from terarec.apps.recipes import load_recipe, recipe_names
from terarec.spec import NegativesSpec, TargetHistory
from terarec.spec.recipe import PublishedRanking, PublishedResult, RecipeSpec

HERE = Path(__file__).resolve().parent
PAGE = MarkedPage(
    rows=HERE / "results" / "accuracy.csv",
    page=HERE.parent / "docs" / "accuracy.md",
    begin="<!-- accuracy: written by benchmarks/accuracy_page.py -->",
    end="<!-- end of accuracy -->",
)
_SAME_FOR_ALL = {"tables", "init", "wide_initializer", "pooling", "activation"}


def newest(rows: Sequence[Found]) -> dict[tuple[str, str], list[Found]]:
    """Map (data, model) to the rows of the version that trained it last, one for each seed."""
    found: dict[tuple[str, str], dict[str, Found]] = {}
    for row in rows:
        seeds = found.setdefault((row["data"], row["model"]), {})
        if any(other["terarec"] != row["terarec"] for other in seeds.values()):
            seeds.clear()
        # A run of several labels has a row for each.
        seeds[row["seed"] + row.get("metric", "")] = row
    return {recipe: list(seeds.values()) for recipe, seeds in found.items()}


def page_tables(rows: Sequence[Found]) -> str:
    """Return Markdown: for each data set a heading, a table of the figures and a table of the settings."""
    runs = newest(rows)
    first: dict[frozenset[str], str] = {}
    sections = []
    for data, models in recipe_names().items():
        recipes = {model: load_recipe(data, model) for model in _in_order(data, models)}
        lines = list(_settings_table(recipes))
        same = first.setdefault(frozenset(lines), data)
        if same != data:
            lines = [f"The settings are those of {same}."]
        trained = {model: runs[data, model] for model in recipes if (data, model) in runs}
        compared = {model: of_model for model, of_model in trained.items() if "peer_ndcg" in of_model[0]}
        sections.append("\n".join([*_section(data, recipes, runs), *_beside(compared), *lines]))
    sections.extend(_tasks([row for row in rows if "label" in row]))
    return "\n\n".join(sections)


def read_rows() -> list[Found]:
    """Return all rows of the results, oldest first."""
    others = ("accuracy_ranking.csv", "accuracy_recbole.csv", "accuracy_tasks.csv")
    return [
        *PAGE.read_rows(),
        *(row for name in others for row in PAGE._replace(rows=PAGE.rows.with_name(name)).read_rows()),
    ]


def _in_order(data: str, models: Sequence[str]) -> Sequence[str]:
    """Sort models by what is published; those without a figure are last."""
    first = {model: next(iter(load_recipe(data, model).published.metrics.values())) for model in models}
    return sorted(models, key=lambda model: math.inf if first[model] is None else first[model])


def _section(
    data: str, recipes: Mapping[str, RecipeSpec], runs: Mapping[tuple[str, str], Sequence[Found]]
) -> Iterator[str]:
    yield f"## {data}\n"
    rankings = [recipe.published for recipe in recipes.values() if isinstance(recipe.published, PublishedRanking)]
    has_precision = any(ranking.precision is not None for ranking in rankings)
    if rankings:
        titles = ["published HR@10", "HR@10", "least", "difference", "published NDCG@10", "NDCG@10", "popularity"]
        titles += ["published P@10", "P@10"] * has_precision
    else:
        titles = ["published AUC", "its mean", "AUC", "least", "difference", "published logloss", "logloss"]
    yield f"| {' | '.join(('model', *titles, 'time a run'))} |"
    yield "|---" * (len(titles) + 2) + "|"
    for model, recipe in recipes.items():
        result, of_model = recipe.published, runs.get((data, model), ())
        figures = (
            _ranking(result, of_model, has_precision=has_precision)
            if isinstance(result, PublishedRanking)
            else _figures(result, of_model)
        )
        yield f"| {' | '.join((f'[`{model}`]({result.source})', *figures))} |"
    yield ""
    machines = sorted({_machine(row) for model in recipes for row in runs.get((data, model), ())})
    if machines:
        yield f"Measured with {'; '.join(machines)}.\n"


def _settings_table(recipes: Mapping[str, RecipeSpec]) -> Iterator[str]:
    yield "| model | settings |"
    yield "|---|---|"
    for model, recipe in recipes.items():
        yield f"| `{model}` | {settings(recipe)} |"


def _tasks(rows: Sequence[Found]) -> Iterator[str]:
    """Yield a section for each data set of `accuracy_tasks.py`."""
    found: dict[str, dict[tuple[str, str], dict[str, Found]]] = {}
    for row in rows:
        found.setdefault(row["data"], {}).setdefault((row["label"], row["model"]), {})[row["seed"]] = row
    for data, cases in found.items():
        lines = [f"## {data}\n", "| label | model | AUC | least | compared with | its AUC | gain | time a run |"]
        lines.append("|---" * 8 + "|")
        for (label, model), seeds in cases.items():
            one, *_ = of_seeds = list(seeds.values())
            aucs = [float(row["value"]) for row in of_seeds]
            peer = f"{float(one['peer_value']):.4f}" if one["peer_value"] else ""
            gain = f"{statistics.mean(float(row['gain']) for row in of_seeds):.1%}" if one["gain"] else ""
            seconds = statistics.mean(float(row["seconds"]) for row in of_seeds)
            cells = (label, f"`{model}`", _spread(aucs), f"{min(aucs):.4f}", one["peer"], peer, gain)
            lines.append(f"| {' | '.join(cells)} | {seconds:.0f} s |")
        machines = sorted({_machine(row) for seeds in cases.values() for row in seeds.values()})
        yield "\n".join([*lines, "", f"Measured with {'; '.join(machines)}."])


def _beside(models: Mapping[str, Sequence[Found]]) -> Iterator[str]:
    """Yield a table of the models that `accuracy_recbole.py` has compared, if any."""
    if not models:
        return
    titles = ["HR@10", "NDCG@10", "recall@10", "P@10"]
    yield f"| model | {' | '.join(f'{title} | of RecBole' for title in titles)} | time a run | of RecBole |"
    yield "|---" * (2 * len(titles) + 3) + "|"
    for model, rows in models.items():
        cells = []
        for ours, theirs in (
            ("value", "peer_value"),
            *((name, f"peer_{name}") for name in ("ndcg", "recall", "precision")),
        ):
            cells += [_spread([float(row[side]) for row in rows]) for side in (ours, theirs)]
        cells += [_time(rows, side) for side in ("seconds", "peer_seconds")]
        yield f"| `{model}` | {' | '.join(cells)} |"
    versions = sorted({row["peer_version"] for rows in models.values() for row in rows})
    yield f"\nOf RecBole: {'; '.join(versions)}, in the same runs.\n"


def _ranking(published: PublishedRanking, runs: Sequence[Found], *, has_precision: bool) -> tuple[str, ...]:
    rate, gain, share = (_plain_figure(value) for value in (published.hit_rate, published.ndcg, published.precision))
    if not runs:
        return (rate, "", "", "", gain, "", "", *(share, "") * has_precision, "")
    names = ("value", "ndcg", "popularity")
    rates, gains, popular = ([float(row[name]) for row in runs] for name in names)
    shares = [float(row["precision"]) for row in runs if row.get("precision")]
    return (
        rate,
        _spread(rates),
        f"{min(rates):.4f}",
        "" if published.hit_rate is None else f"{statistics.mean(rates) - published.hit_rate:+.4f}",
        gain,
        _spread(gains),
        f"{popular[0]:.4f}",
        *(share, _spread(shares) if shares else "") * has_precision,
        _time(runs),
    )


def _plain_figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _time(rows: Sequence[Found], column: str = "seconds") -> str:
    """Format the mean time of the rows that have one: none for a run that was stopped for a while or had company."""
    seconds = [float(row[column]) for row in rows if row[column]]
    return f"{statistics.mean(seconds):.0f} s" if seconds else ""


def _figures(published: PublishedResult, runs: Sequence[Found]) -> tuple[str, ...]:
    mean_auc = "" if published.mean_auc is None else f"{published.mean_auc:.4f}"
    if published.label_auc:
        return _figures_of_labels(published, runs)
    auc = "" if published.auc is None else f"{published.auc:.4f}"
    logloss = "" if published.logloss is None else f"{published.logloss:.4f}"
    if not runs:
        return (auc, mean_auc, "", "", "", logloss, "", "")
    aucs, loglosses = ([float(row[name]) for row in runs] for name in ("value", "logloss"))
    return (
        auc,
        mean_auc,
        _spread(aucs),
        f"{min(aucs):.4f}",
        "" if published.auc is None else f"{statistics.mean(aucs) - published.auc:+.4f}",
        logloss,
        _spread(loglosses),
        _time(runs),
    )


def _figures_of_labels(published: PublishedResult, runs: Sequence[Found]) -> tuple[str, ...]:
    areas = {
        label: [float(row["value"]) for row in runs if row["metric"] == f"test AUC/{label}"]
        for label in published.label_auc
    }

    def each(text: Callable[[str], str]) -> str:
        return ", ".join(f"{label} {text(label)}" for label in published.label_auc if areas[label])

    return (
        ", ".join(f"{label} {area:.4f}" for label, area in published.label_auc.items()),
        "",
        each(lambda label: _spread(areas[label])),
        each(lambda label: f"{min(areas[label]):.4f}"),
        each(lambda label: f"{statistics.mean(areas[label]) - published.label_auc[label]:+.4f}"),
        "",
        "",
        _time(runs),
    )


def _spread(values: Sequence[float]) -> str:
    """Format the mean and standard deviation over the seeds."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def _machine(row: Found) -> str:
    return f"terarec {row['terarec']}, torch {row['torch']}, {row['cores']} cores of {row['cpu']}"


def settings(recipe: RecipeSpec) -> str:
    """Format the model fields in which recipes differ, the optimizer of the tables, and the length of rankings."""
    run = recipe.run
    parts = [
        f"{field.name} {_plain(getattr(run.model, field.name))}"
        for field in fields(run.model)
        if field.name not in _SAME_FOR_ALL
    ]
    rows = run.sparse_optimizer.rows
    l2 = f", L2 {rows.l2:g}" if rows is not None and rows.l2 else ""
    parts.append(f"tables: {run.sparse_optimizer.kind} {run.sparse_optimizer.lr:g}{l2}")
    if isinstance(recipe.published, PublishedRanking):
        parts.append(f"batch {run.training.batch_size}; {run.training.epochs} epochs")
    return "; ".join(parts)


def _plain(value: object) -> str:
    if isinstance(value, TargetHistory):
        return f"{value.target} and {value.history}"
    if isinstance(value, tuple):
        return "-".join(map(_plain, value)) or "none"
    if isinstance(value, NegativesSpec):
        return f"{value.count} {value.draw}"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.page.write_text(PAGE.with_tables(page_tables(read_rows())))
