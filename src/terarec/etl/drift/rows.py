"""The rows of a data set that are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from terarec.errors import ConfigError
from terarec.etl.drift.id_names import id_names
from terarec.etl.drift.summary import DataSummary, summarize
from terarec.formats import ColumnBlock, open_shard, read_dataset
from terarec.spec import DatasetSpec


def summarize_dataset(
    directory: Path, splits: Sequence[str] | None = None, *, allow_import: Sequence[str] = ()
) -> DataSummary:
    """The summary of rows of the data set in `directory`, which is called by that directory's name.

    Args:
        directory: with ``dataset.json``.
        splits: whose rows are looked at; None: all.
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
    names = id_names(directory, spec, allow_import=allow_import)
    return summarize(directory.absolute().name, spec, _blocks(directory, spec, wanted), names)


def _blocks(directory: Path, spec: DatasetSpec, splits: Sequence[str]) -> Iterator[ColumnBlock]:
    for split in splits:
        for description in spec.shards(split):
            shard = open_shard(spec, directory / description.file, description.rows)
            for group in range(len(shard.group_rows)):
                yield shard.read_group(group)
