"""The rows of a data set that are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from terarec.errors import ConfigError
from terarec.etl.drift.summary import DataSummary, summarize
from terarec.etl.workflow import workflow_of
from terarec.formats import ColumnBlock, open_shard, read_dataset
from terarec.spec import DatasetSpec


def summarize_dataset(
    directory: Path,
    splits: Sequence[str] | None = None,
    *,
    name: str | None = None,
    allow_import: Sequence[str] = (),
) -> DataSummary:
    """The summary of rows of the data set in `directory`, called by a name and the splits.

    Args:
        directory: with ``dataset.json``.
        splits: whose rows are looked at; None: all.
        name: of the data; None: that of the directory.
        allow_import: packages whose functions the workflow may name, as for `terarec.etl.workflow.Workflow.load`.

    Raises:
        DataNotFoundError: no data set, or one of its files is not there.
        FormatError: a file that does not hold what it promises.
        ConfigError: a split that the data set does not have, no rows, or a function in the workflow that is not
            allowed.
    """
    spec = read_dataset(directory)
    wanted = tuple(spec.splits) if splits is None else tuple(splits)
    if not sum(spec.num_rows(split) for split in wanted):
        raise ConfigError(f"{directory}: got no rows in {', '.join(wanted) or 'any split'}, expected at least one")
    workflow = workflow_of(directory, allow_import=allow_import)
    called = name or directory.absolute().name
    called = called if splits is None else f"{called} ({', '.join(wanted)})"
    return summarize(called, spec, _blocks(directory, spec, wanted), workflow)


def names_apart(one: Path, other: Path) -> tuple[str, str]:
    """The names of two directories, after those of the directories around them as far as these tell them apart."""
    parts, others = one.absolute().parts, other.absolute().parts
    for depth in range(1, min(len(parts), len(others)) + 1):
        if parts[-depth:] != others[-depth:]:
            return "/".join(parts[-depth:]), "/".join(others[-depth:])
    return parts[-1], others[-1]


def _blocks(directory: Path, spec: DatasetSpec, splits: Sequence[str]) -> Iterator[ColumnBlock]:
    for split in splits:
        for description in spec.shards(split):
            shard = open_shard(spec, directory / description.file, description.rows)
            for group in range(len(shard.group_rows)):
                yield shard.read_group(group)
