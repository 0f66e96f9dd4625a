"""Reading a checkpoint."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terarec.checkpoint.layout import DENSE, OPTIMIZER, STATE, STATE_PREFIX, WEIGHTS, parse_table_file
from terarec.checkpoint.manifest import MANIFEST, FileEntry, Manifest, read_manifest
from terarec.checkpoint.optimizer_state import unflatten
from terarec.errors import ConfigError, FormatError
from terarec.formats import read_tensors
from terarec.storage import Rows, Store


class Checkpoint:
    """A whole checkpoint, each part of it read when asked for and compared with its checksum.

    Attributes:
        path: its directory.
        step: training steps done.
        rng: ``torch.get_rng_state()`` of then.
        progress: the JSON data of `TrainState.progress`.
    """

    def __init__(self, path: Path, manifest: Manifest, state: Mapping[str, Any]) -> None:
        self.path = path
        self._manifest = manifest
        self.step = manifest.step
        self.rng = torch.frombuffer(bytearray(base64.b64decode(state["rng"])), dtype=torch.uint8)
        self.progress: dict[str, Any] = state["progress"]

    def dense(self) -> dict[str, Tensor]:
        """The model's dense parameters and buffers."""
        return self._read(DENSE)[0]

    def optimizer(self) -> dict[str, Any]:
        """What the dense optimizer's ``load_state_dict`` takes."""
        tensors, metadata = self._read(OPTIMIZER)
        return unflatten(tensors, metadata.get("optimizer", ""))

    def load_tables(self, tables: Mapping[str, Store], *, with_state: bool) -> None:
        """Overwrite the rows of `tables`; one piece at a time is held beside them.

        Args:
            tables: by name, all those of the checkpoint and no other.
            with_state: also the row optimizer's state, which `tables` must have room for; serving leaves it.

        Raises:
            ConfigError: other tables, or a table of another number of rows.
            StorageError: another width, or another optimizer's state.
            FormatError: a damaged file.
        """
        pieces = self._table_pieces()
        if set(pieces) != set(tables):
            raise ConfigError(f"{self.path}: holds the tables {sorted(pieces)}, expected {sorted(tables)}")
        for name, entries in pieces.items():
            self._load_table(tables[name], entries, with_state=with_state)

    def _load_table(self, table: Store, entries: list[FileEntry], *, with_state: bool) -> None:
        next_key = 0
        for entry in entries:
            tensors, metadata = self._read(entry.file)
            expected = {"table": table.name, "first_key": str(next_key), "rows": str(len(table))}
            if metadata.get("rows") != expected["rows"]:
                raise ConfigError(
                    f"{self.path}: table {table.name!r} has {metadata.get('rows')} rows, expected {len(table)}"
                )
            if metadata != expected or WEIGHTS not in tensors:
                raise FormatError(f"{self.path / entry.file}: describes itself as {metadata}, expected {expected}")
            weights = tensors.pop(WEIGHTS)
            state = {name.removeprefix(STATE_PREFIX): value for name, value in tensors.items()} if with_state else {}
            if with_state and set(state) != set(table.state_names):
                raise ConfigError(
                    f"{self.path}: table {table.name!r} comes with the optimizer state {sorted(state)}, "
                    f"expected {sorted(table.state_names)}"
                )
            table.import_(Rows(keys=torch.arange(next_key, next_key + len(weights)), weights=weights, state=state))
            next_key += len(weights)
        if next_key != len(table):
            raise FormatError(f"{self.path}: holds {next_key} of the {len(table)} rows of table {table.name!r}")

    def _table_pieces(self) -> dict[str, list[FileEntry]]:
        """Table -> its files in order."""
        pieces: dict[str, list[FileEntry]] = {}
        for entry in sorted(self._manifest.files, key=lambda entry: (len(entry.file), entry.file)):
            parsed = parse_table_file(entry.file)
            if parsed is not None:
                pieces.setdefault(parsed[0], []).append(entry)
        return pieces

    def _read(self, file: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        arrays, metadata = read_tensors(self.path / file, sha256=self._manifest.entry(file).sha256)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}, metadata


def load(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`: its manifest and ``state.json`` are read and checked, the rest when asked for.

    Raises:
        DataNotFoundError: `path` is no whole checkpoint.
        FormatError: a file is missing, damaged or of a newer version; the message names it.
    """
    manifest = read_manifest(path)
    state = _read_state(path / STATE, manifest.entry(STATE))
    if state["step"] != manifest.step:
        raise FormatError(f"{path / MANIFEST}: $.step is {manifest.step}, but {STATE} is of step {state['step']}")
    return Checkpoint(path, manifest, state)


def _read_state(path: Path, entry: FileEntry) -> dict[str, Any]:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise FormatError(f"{path}: damaged: its SHA-256 is not the one in {MANIFEST}")
    try:
        state = json.loads(content)
        return {"step": int(state["step"]), "progress": dict(state["progress"]), "rng": str(state["rng"])}
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path}: expected step, progress and rng ({error!r})") from None
