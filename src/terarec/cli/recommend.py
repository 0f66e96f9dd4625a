"""``terarec recommend``: items for users, retrieved by a two-tower model and ranked by another one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terarec.cli.options import AllowImport, CheckpointOption, DeviceOption, Force, SpecFields
from terarec.cli.show import Show
from terarec.errors import ConfigError
from terarec.spec import ItemIndexSpec

if TYPE_CHECKING:
    import pyarrow as pa

    from terarec.serve import InputColumn

_USERS = 1024  # scored at once


@dataclass(frozen=True, kw_only=True)
class RecommendOptions:
    """Options of ``terarec recommend``."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="What terarec train wrote of a two-tower model.")]
    users: Annotated[Path, typer.Argument(metavar="USERS", help="Raw columns of users: .parquet, .csv or .jsonl.")]
    items: Annotated[Path, typer.Option(metavar="FILE", help="Raw columns of all items: .parquet, .csv or .jsonl.")]
    key: Annotated[str, typer.Option(metavar="COLUMN", help="Column that identifies items.")]
    out: Annotated[Path, typer.Option(help="File to write, a line per user and item: .parquet, .csv or .jsonl.")]
    ranker: Annotated[Path | None, typer.Option(metavar="RUN", help="The model that ranks the candidates.")] = None
    k: Annotated[int, typer.Option("--k", min=1, help="Items for a user.")] = 10
    candidates: Annotated[int, typer.Option(min=1, help="Items that are retrieved for the ranker.")] = 200
    exclude: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of USERS: lists of items that a user does not get.")
    ] = None
    allow: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the column of --key: the only items to recommend.")
    ] = None
    index: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory that keeps the items' index.")] = None
    search: Annotated[ItemIndexSpec, SpecFields("method", "exact_items", "lists", "probes")]
    checkpoint: CheckpointOption = None
    device: DeviceOption = None
    force: Force = False
    allow_import: AllowImport = None


def recommend(options: RecommendOptions, show: Show) -> None:
    """Run ``terarec recommend``."""
    import pyarrow as pa

    from terarec.formats import check_suffix, table_file
    from terarec.io import check_new_file
    from terarec.serve import Catalogue, InferenceSession, Recommender, Towers
    from terarec.train.devices import resolve_device
    from terarec.train.run_dir import check_run

    started = time.perf_counter()
    check_new_file(options.out, replace=options.force)  # before large models are loaded
    check_suffix(options.out)
    device, allowed = resolve_device(options.device or "auto"), options.allow_import or ()
    check_run(options.run)
    if options.ranker is not None:
        check_run(options.ranker)
    towers = Towers.open(options.run, options.checkpoint, device=device, allow_import=allowed)
    ranker = None
    if options.ranker is not None:
        ranker = InferenceSession.open(options.ranker, device=device, allow_import=allowed)
    inputs = [*towers.inputs, *(() if ranker is None else ranker.inputs)]
    catalogue = Catalogue(_read(options.items, inputs), options.key)
    allow = None if options.allow is None else _column(_read(options.allow, inputs), options.key, "--allow")
    users = _read(options.users, inputs)
    if options.exclude is not None:
        _column(users, options.exclude, "--exclude")
    recommender = Recommender.open(towers, catalogue, ranker=ranker, index=options.search, index_dir=options.index)
    given = [name for name in recommender.user_columns if name in users.column_names]
    rows: int = users.num_rows
    kind = catalogue.columns.schema.field(options.key).type
    schema = pa.schema([("row", pa.int64()), ("rank", pa.int64()), (options.key, kind), ("score", pa.float32())])
    recommended = 0
    with table_file(options.out, schema, replace=options.force) as file, show.progress("recommending", "users") as tell:
        for begin in range(0, rows, _USERS):
            part = users.slice(begin, _USERS)
            found = recommender.recommend(
                {name: part.column(name) for name in given},
                options.k,
                candidates=options.candidates,
                exclude=None if options.exclude is None else _lists(part.column(options.exclude)),
                allow=allow,
            )
            row = [begin + number for number, items in enumerate(found.items) for _ in items]
            rank = [place for items in found.items for place in range(1, 1 + len(items))]
            items, scores = (_flat(lists) for lists in (found.items, found.scores))
            file.write_table(
                pa.Table.from_pydict(dict(zip(schema.names, (row, rank, items, scores), strict=True)), schema)
            )
            recommended += len(items)
            tell(begin + part.num_rows, rows)
    figures = {"out": str(options.out), "users": rows, "items": len(catalogue), "search": recommender.index.method}
    spent = {"recommended": recommended, "step": towers.step, "seconds": time.perf_counter() - started}
    show.result(f"Recommendations in {options.out}", {**figures, **spent})


def _read(path: Path, inputs: Iterable[InputColumn]) -> pa.Table:
    """Return the columns of a file; those of CSV are texts where a model reads texts."""
    from terarec.formats import read_table_file

    return read_table_file(path, texts=[column.name for column in inputs if column.kind == "string"])


def _column(table: pa.Table, name: str, option: str) -> list[Any]:
    if name not in table.column_names:
        raise ConfigError(option, f"got no column {name!r}, expected one of {', '.join(table.column_names)}")
    found: list[Any] = table.column(name).to_pylist()
    return found


def _lists(column: pa.ChunkedArray) -> list[list[Any]]:
    found = column.to_pylist()
    if not all(value is None or isinstance(value, list) for value in found):
        raise ConfigError("--exclude", f"got a column of type {column.type}, expected lists of items")
    return [value or [] for value in found]


def _flat(lists: list[list[Any]]) -> list[Any]:
    return [value for held in lists for value in held]
