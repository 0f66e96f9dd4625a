# SPDX-License-Identifier: Apache-2.0
"""Rewrite the tables of docs/accuracy.md from the recipes and the newest rows of results/accuracy*.csv.

Run it after `accuracy.py`: ``python benchmarks/accuracy_page.py``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from marked_page import Found, MarkedPage

from terarec.apps.recipes import load_recipe, recipe_names
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
        seeds[row["seed"]] = row
    return {recipe: list(seeds.values()) for recipe, seeds in found.items()}


def page_tables(rows: Sequence[Found]) -> str:
    """Return Markdown: for each data set a heading, a table of the figures and a table of the settings."""
    runs = newest(rows)
    return "\n\n".join("\n".join(_section(data, models, runs)) for data, models in recipe_names().items())


def read_rows() -> list[Found]:
    """Return all rows of the results, oldest first."""
    return [*PAGE.read_rows(), *PAGE._replace(rows=PAGE.rows.with_name("accuracy_ranking.csv")).read_rows()]


def _section(data: str, models: Sequence[str], runs: Mapping[tuple[str, str], Sequence[Found]]) -> Iterator[str]:
    recipes = {model: load_recipe(data, model) for model in models}
    published = {model: recipe.published for model, recipe in recipes.items()}
    order = sorted(models, key=lambda model: next(iter(published[model].metrics.values())) or 0.0)
    yield f"## {data}\n"
    if isinstance(published[order[0]], PublishedRanking):
        titles = ["published HR@10", "HR@10", "least", "difference", "published NDCG@10", "NDCG@10", "popularity"]
    else:
        titles = ["published AUC", "its mean", "AUC", "least", "difference", "published logloss", "logloss"]
    yield f"| {' | '.join(('model', *titles, 'time a run'))} |"
    yield "|---" * (len(titles) + 2) + "|"
    for model in order:
        result, of_model = published[model], runs.get((data, model), ())
        figures = _ranking(result, of_model) if isinstance(result, PublishedRanking) else _figures(result, of_model)
        yield f"| {' | '.join((f'[`{model}`]({result.source})', *figures))} |"
    yield ""
    machines = sorted({_machine(row) for model in order for row in runs.get((data, model), ())})
    if machines:
        yield f"Measured with {'; '.join(machines)}.\n"
    yield "| model | settings |"
    yield "|---|---|"
    for model in order:
        yield f"| `{model}` | {settings(recipes[model])} |"


def _ranking(published: PublishedRanking, runs: Sequence[Found]) -> tuple[str, ...]:
    if not runs:
        return (f"{published.hit_rate:.4f}", "", "", "", f"{published.ndcg:.4f}", "", "", "")
    names = ("value", "ndcg", "popularity", "seconds")
    rates, gains, popular, seconds = ([float(row[name]) for row in runs] for name in names)
    return (
        f"{published.hit_rate:.4f}",
        _spread(rates),
        f"{min(rates):.4f}",
        f"{statistics.mean(rates) - published.hit_rate:+.4f}",
        f"{published.ndcg:.4f}",
        _spread(gains),
        f"{popular[0]:.4f}",
        f"{statistics.mean(seconds):.0f} s",
    )


def _figures(published: PublishedResult, runs: Sequence[Found]) -> tuple[str, ...]:
    mean_auc = "" if published.mean_auc is None else f"{published.mean_auc:.4f}"
    if not runs:
        return (f"{published.auc:.4f}", mean_auc, "", "", "", f"{published.logloss:.4f}", "", "")
    aucs, loglosses, seconds = ([float(row[name]) for row in runs] for name in ("value", "logloss", "seconds"))
    return (
        f"{published.auc:.4f}",
        mean_auc,
        _spread(aucs),
        f"{min(aucs):.4f}",
        f"{statistics.mean(aucs) - published.auc:+.4f}",
        f"{published.logloss:.4f}",
        _spread(loglosses),
        f"{statistics.mean(seconds):.0f} s",
    )


def _spread(values: Sequence[float]) -> str:
    """Format the mean and standard deviation over the seeds."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def _machine(row: Found) -> str:
    return f"terarec {row['terarec']}, torch {row['torch']}, {row['cores']} cores of {row['cpu']}"


def settings(recipe: RecipeSpec) -> str:
    """Format the model fields in which recipes differ, and the optimizer of the tables."""
    run = recipe.run
    parts = [
        f"{field.name} {_plain(getattr(run.model, field.name))}"
        for field in fields(run.model)
        if field.name not in _SAME_FOR_ALL
    ]
    rows = run.sparse_optimizer.rows
    l2 = f", L2 {rows.l2:g}" if rows is not None and rows.l2 else ""
    return "; ".join((*parts, f"tables: {run.sparse_optimizer.kind} {run.sparse_optimizer.lr:g}{l2}"))


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.page.write_text(PAGE.with_tables(page_tables(read_rows())))
