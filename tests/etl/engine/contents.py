# SPDX-License-Identifier: Apache-2.0
"""What lies in a data set's directory."""

from pathlib import Path

from terarec.formats import read_dataset
from terarec.formats.block import ColumnBlock, merge
from terarec.formats.shard import open_shard


def contents(out: Path) -> dict[str, bytes]:
    """Every file but the report, which has times in it."""
    files = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    files.pop("report.json", None)
    place = str(out.resolve()).encode()
    return {name: content.replace(place, b"OUT") for name, content in files.items()}


def read_split(out: Path, split: str) -> ColumnBlock:
    """All rows of a split."""
    spec = read_dataset(out)
    shards = [open_shard(spec, out / shard.file, shard.rows) for shard in spec.shards(split)]
    return merge([shard.read_group(group) for shard in shards for group in range(len(shard.group_rows))])
