"""MIND, Microsoft's pages of a news site (2019)."""

from __future__ import annotations

from terarec.etl.ops import Categorify, Explode, JoinTable, ListSlice, LogOp, Normalize, Rename, SplitText
from terarec.etl.ready.row_steps import row_step
from terarec.spec import LabelSpec, SourceColumn, SourceSpec, Split, SplitByFiles, WorkflowSpec

_NEWS = ("news_id", "category", "subcategory", "title", "abstract", "url", "title_entities", "abstract_entities")

_SOURCE = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="impression_id", type="integer"),
        SourceColumn(name="user_id", type="text"),
        SourceColumn(name="time", type="time", format="%m/%d/%Y %I:%M:%S %p"),
        SourceColumn(name="history", type="text", separator=" "),
        SourceColumn(name="impressions", type="text", separator=" "),
    ),
)
_ARTICLES = SourceSpec(format="delimited", columns=tuple(SourceColumn(name=name, type="text") for name in _NEWS))

_SPLIT = SplitByFiles(valid=1)


def mind(*, min_count: int = 2, history: int = 50, split: Split | None = _SPLIT) -> WorkflowSpec:
    """Prepares ``behaviors.tsv``: every article on a page is a sample, with what its reader has read before.

    The side table "news" is ``news.tsv``, with every article once.

    Args:
        min_count: values that occur less often in the training part share an id.
        history: the articles read last, at most so many.
        split: by default the last file, that of the day to predict.
    """
    alone = ("subcategory", "user_id", "hour_of_day")
    return WorkflowSpec(
        name="mind",
        source=_SOURCE,
        tables={"news": _ARTICLES},
        steps=(
            Explode(columns=("impressions",)),
            SplitText(columns=("impressions",), separator="-", outputs=("shown", "clicked"), types=("text", "integer")),
            row_step("hour_and_weekday", "time", "hour_of_day", "weekday"),
            ListSlice(columns=("history",), start=-history),
            row_step("length", "history", "read_count"),
            LogOp(columns=("read_count",)),
            Normalize(columns=("read_count",)),
            # The table is asked twice by its key's name: for all that was read, and for what is shown.
            Rename(names={"history": "news_id"}),
            JoinTable(table="news", on="news_id", columns=("category",)),
            Rename(names={"news_id": "read_news", "category": "read_categories"}),
            Rename(names={"shown": "news_id"}),
            JoinTable(table="news", on="news_id", columns=("category", "subcategory")),
            Categorify(columns=("news_id", "read_news"), min_count=min_count, joint=True),
            Categorify(columns=("category", "read_categories"), min_count=min_count, joint=True),
            Categorify(columns=alone, min_count=min_count),
        ),
        split=split,
        labels=(LabelSpec(name="clicked", is_probability=True),),
        dense=("read_count",),
        categorical=("news_id", "category", *alone, "read_news", "read_categories"),
    )
