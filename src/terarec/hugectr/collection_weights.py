# SPDX-License-Identifier: Apache-2.0
"""The tables of an embedding collection as HugeCTR's dumps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from terarec.formats.hugectr.collection import CollectionDump, DumpedTable, open_collection, write_collection
from terarec.formats.hugectr.weights import SparseRows
from terarec.hugectr.errors import BrokenFileError, OutOfBoundError, WrongInputError
from terarec.hugectr.sparse_weights import pieces
from terarec.storage import RowValues
from terarec.storage.kinds import AnyTable

Tables = Mapping[str, AnyTable]


def dump_folder(path: Path, number: int) -> Path:
    """Return the folder of the collection `number` of a model below `path`."""
    return path / f"embedding_collection_{number}"


def dump_collection(tables: Tables, folder: Path, *, names: Sequence[str] = (), key_bytes: Literal[4, 8] = 8) -> None:
    """Write tables with ascending keys.

    Args:
        tables: All tables of the collection, in the order of its configuration, which numbers them.
        folder: See `dump_folder`.
        names: Names of tables; all if empty.
        key_bytes: Bytes of a key, 4 or 8, by ``i64_input_key``.
    """
    # By its description, which `write_collection` passes back for the rows of one table after the other.
    chosen = {
        DumpedTable(number, len(table), table.width): table
        for number, (name, table) in enumerate(tables.items())
        if name in _checked(tables, names)
    }
    write_collection(folder, list(chosen), lambda described: _chunks(chosen[described]), key_bytes=key_bytes)


def load_collection(tables: Tables, folder: Path, *, names: Sequence[str] = ()) -> None:
    """Load tables from a dump, replacing the rows that they hold.

    Rows of static tables that the dump does not name stay.

    Args:
        tables: All tables of the collection, in the order of its configuration, which numbers them.
        folder: See `dump_folder`.
        names: Names of tables; all of the dump if empty.

    Raises:
        WrongInputError: An unknown table.
        DataNotFoundError: No dump.
        FormatError: Damaged, without a table that was named, or of another width; nothing is changed then.
        OutOfBoundError: A key outside its static table; nothing is changed then.
    """
    dump, chosen = _opened(tables, folder, names)
    # All chosen tables are checked by now, so that a damaged one changes nothing.
    for described, table in chosen:
        if table.keyed is not None:
            table.keyed.clear()
        for chunk in dump.chunks(described):
            device = table.arena.device
            weights = torch.from_numpy(chunk.vectors).to(device, table.arena.dtype)
            table.import_(RowValues(keys=torch.from_numpy(chunk.keys).to(device), weights=weights))


def check_collection(tables: Tables, folder: Path, *, names: Sequence[str] = ()) -> None:
    """Raise the errors of `load_collection` without changing anything."""
    _opened(tables, folder, names)


def _opened(
    tables: Tables, folder: Path, names: Sequence[str]
) -> tuple[CollectionDump, list[tuple[DumpedTable, AnyTable]]]:
    """Return a dump, and its tables with the tables of the model to load them into."""
    wanted = _checked(tables, names)
    dump = open_collection(folder)
    tables_by_id = {described.table_id: described for described in dump.tables}
    chosen = []
    for number, (name, table) in enumerate(tables.items()):
        # A dump of some tables is loaded as a whole without names; a named table has to be there.
        if name in wanted and (names or number in tables_by_id):
            if number not in tables_by_id:
                raise BrokenFileError(folder, f"holds no table {number} ({name!r}), expected what load names")
            _check(dump, tables_by_id[number], table)
            chosen.append((tables_by_id[number], table))
    return dump, chosen


def _checked(tables: Tables, names: Sequence[str]) -> set[str]:
    for name in names:
        if name not in tables:
            raise WrongInputError("table_names", f"got {name!r}, expected some of {', '.join(tables)}")
    return set(names or tables)


def _chunks(table: AnyTable) -> Iterator[SparseRows]:
    for keys in pieces(table.keys()):
        yield SparseRows(keys.cpu().numpy(), table.export(keys).weights.float().cpu().numpy())


def _check(dump: CollectionDump, described: DumpedTable, table: AnyTable) -> None:
    """Raise unless the rows of the dump fit `table`."""
    where = f"{dump.path}, table {described.table_id} ({table.name!r})"
    if described.width != table.width:
        raise BrokenFileError(where, f"has width {described.width}, expected {table.width}")
    # All keys at once, 8 bytes a row: a repeated one may be in any two chunks.
    keys = np.concatenate([np.empty(0, np.int64), *(chunk.keys for chunk in dump.chunks(described))])
    distinct, counts = np.unique(keys, return_counts=True)
    if len(distinct) != len(keys):
        raise BrokenFileError(where, f"holds key {distinct[counts > 1][0]} twice, expected distinct keys")
    if not table.is_dynamic:
        outside = distinct[(distinct < 0) | (distinct >= len(table))]
        if len(outside):
            raise OutOfBoundError(where, f"holds key {outside[0]}, expected 0 <= key < {len(table)}")
