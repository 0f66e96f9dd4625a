"""Save and load checkpoints. The files are described in docs/formats.md."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from terarec.checkpoint.directory import (
    DENSE,
    KEYS,
    MANIFEST,
    OPTIMIZER,
    STATE,
    STATE_PREFIX,
    USE_PREFIX,
    WEIGHTS,
    FileEntry,
    Manifest,
    keep_newest,
    memory_file,
    parse_memory_file,
    parse_table_file,
    read_manifest,
    staged,
    step_path,
    table_file,
    write_manifest,
)
from terarec.checkpoint.state import TrainState, as_array, as_tensor, flatten, unflatten
from terarec.errors import ConfigError, FormatError
from terarec.formats import read_tensors, write_tensors
from terarec.io import write_bytes
from terarec.spec.codec import parse_json
from terarec.spec.quoting import shortened
from terarec.storage import Rows, Store

SHARD_BYTES = 256 * 2**20
"""Most bytes of rows in one file: the memory that loading needs in addition to the tables."""
_MEMORY_KEY_BYTES = 16  # a key that waits for admission, with its count


def save(directory: Path, state: TrainState, *, keep: int | None = None) -> Path:
    """Write `state` atomically as a new checkpoint below `directory`.

    Tables are streamed from their memory or disk; no further memory worth counting is allocated.

    Args:
        directory: Directory of the checkpoints, for example ``RUN/checkpoints``.
        state: State to write.
        keep: Number of the newest checkpoints to keep, this one included, besides the one marked best; None for all.

    Returns:
        The checkpoint's path.

    Raises:
        StorageError: A write fails, or the step has a checkpoint already. Earlier checkpoints stay complete.
        ConfigError: A tensor of a type that a container lacks, such as float8, or progress that is not JSON data.
    """
    with staged(directory, state.step) as checkpoint:
        write_manifest(checkpoint, state.step, list(_write_files(checkpoint, state)))
    if keep is not None:
        keep_newest(directory, keep)
    return step_path(directory, state.step)


def _write_files(checkpoint: Path, state: TrainState) -> Iterator[FileEntry]:
    for table in state.tables.values():
        yield from _write_table(checkpoint, table)
    yield _write_tensors(checkpoint, DENSE, _arrays(state.dense), {})
    tensors, text = flatten(state.optimizer)
    yield _write_tensors(checkpoint, OPTIMIZER, _arrays(tensors), {"optimizer": text})
    yield _write_state(checkpoint, state)


def _write_table(checkpoint: Path, table: Store) -> Iterator[FileEntry]:
    first, num_rows, seed = 0, table.num_changed, table.first_seed
    for index, rows in enumerate(table.export_changed(max(1, SHARD_BYTES // table.row_bytes))):
        tensors = {WEIGHTS: rows.weights, **_prefixed(STATE_PREFIX, rows.state), **_prefixed(USE_PREFIX, rows.uses)}
        metadata = {"table": table.name, "rows": str(num_rows)}
        if table.is_dynamic or seed is not None:
            tensors[KEYS] = rows.keys
            metadata["first_row"] = str(first)
            metadata |= {} if seed is None else {"of_rows": str(len(table)), "seed": str(seed)}
        else:
            metadata["first_key"] = str(first)
        yield _write_tensors(checkpoint, table_file(table.name, index), _arrays(tensors), metadata)
        first += len(rows.keys)
    for index, piece in enumerate(table.export_memory(SHARD_BYTES // _MEMORY_KEY_BYTES)):
        yield _write_tensors(checkpoint, memory_file(table.name, index), _arrays(piece), {"table": table.name})


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _write_state(checkpoint: Path, state: TrainState) -> FileEntry:
    rng = base64.b64encode(state.rng.numpy().tobytes()).decode()
    try:
        content = json.dumps({"step": state.step, "progress": state.progress, "rng": rng}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "progress",
            f"{error}, expected JSON data; of a row optimizer that is step_state(): the tables hold the "
            "state of its rows",
        ) from None
    write_bytes(checkpoint / STATE, content)
    return FileEntry(file=STATE, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def _write_tensors(
    checkpoint: Path, file: str, arrays: Mapping[str, npt.NDArray[np.generic]], metadata: Mapping[str, str]
) -> FileEntry:
    sha256 = write_tensors(checkpoint / file, arrays, metadata)
    return FileEntry(file=file, bytes=(checkpoint / file).stat().st_size, sha256=sha256)


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, npt.NDArray[np.generic]]:
    return {name: as_array(name, tensor) for name, tensor in tensors.items()}


class Checkpoint:
    """Complete checkpoint; each part is read when requested and compared with its checksum.

    Attributes:
        path: Directory of the checkpoint.
        step: Training steps done.
        rng: ``torch.get_rng_state()`` of then.
        progress: The JSON data of `TrainState.progress`.
    """

    def __init__(self, path: Path, manifest: Manifest, state: Mapping[str, Any]) -> None:
        self.path = path
        self._manifest = manifest
        self.step = manifest.step
        self.rng = torch.frombuffer(state["rng"], dtype=torch.uint8)
        self.progress: dict[str, Any] = state["progress"]

    def dense(self) -> dict[str, Tensor]:
        """Return the model's dense parameters and buffers."""
        return self._read(DENSE)[0]

    def optimizer(self) -> dict[str, Any]:
        """Return the argument of the dense optimizer's ``load_state_dict``."""
        tensors, metadata = self._read(OPTIMIZER)
        return unflatten(tensors, metadata.get("optimizer", ""))

    def load_tables(self, tables: Mapping[str, Store], *, with_state: bool) -> None:
        """Overwrite the rows of `tables`, one piece at a time. Dynamic tables hold no other rows afterwards.

        Args:
            tables: Tables by name, exactly those of the checkpoint.
            with_state: Whether to load the row optimizer's state, which `tables` must have memory for, and the key
                counts of dynamic tables; serving needs neither.

        Raises:
            ConfigError: Other tables, or a table of another number of rows or another type.
            StorageError: Another width, or another optimizer's state.
            FormatError: A damaged file.
        """
        pieces = self._pieces(parse_table_file)
        if set(pieces) != set(tables):
            raise ConfigError(self.path, f"holds the tables {sorted(pieces)}, expected {sorted(tables)}")
        memories = self._pieces(parse_memory_file) if with_state else {}
        for name, entries in pieces.items():
            self._load_table(tables[name], entries, with_state=with_state)
            for entry in memories.get(name, []):
                tables[name].import_memory(self._read(entry.file)[0])

    def _load_table(self, table: Store, entries: list[FileEntry], *, with_state: bool) -> None:
        done, num_rows, has_keys, seed = 0, 0, False, ""
        for entry in entries:
            tensors, metadata = self._read(entry.file)
            if entry is entries[0]:
                num_rows, has_keys = self._check_kind(table, tensors, metadata), KEYS in tensors
                seed = metadata.get("seed", "")
            place = "first_row" if KEYS in tensors else "first_key"
            expected = {"table": table.name, place: str(done), "rows": str(num_rows)}
            if KEYS in tensors and not table.is_dynamic:
                expected |= {"of_rows": str(len(table)), "seed": seed}
            if metadata != expected or WEIGHTS not in tensors or (KEYS in tensors) != has_keys:
                raise FormatError(self.path / entry.file, f"describes itself as {metadata}, expected {expected}")
            rows = _rows(tensors, done)
            if with_state and set(rows.state) != set(table.state_names):
                raise ConfigError(
                    self.path,
                    f"table {table.name!r} comes with the optimizer state {sorted(rows.state)}, "
                    f"expected {sorted(table.state_names)}",
                )
            if entry is entries[0]:
                table.clear()
                if has_keys and not table.is_dynamic:
                    table.restart(int(seed))
            table.import_(rows if with_state else Rows(keys=rows.keys, weights=rows.weights))
            done += len(rows.keys)
        if done != num_rows:
            raise FormatError(self.path, f"holds {done} of the {num_rows} rows of table {table.name!r}")

    def _check_kind(self, table: Store, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
        """Return the number of rows of a table by its first piece; a static one must have as many as `table`."""
        kinds = {False: "static", True: "dynamic"}
        is_dynamic = KEYS in tensors and "of_rows" not in metadata
        if is_dynamic != table.is_dynamic:
            got, expected = kinds[is_dynamic], kinds[table.is_dynamic]
            raise ConfigError(self.path, f"table {table.name!r} is {got}, expected a {expected} one")
        num_rows = metadata.get("rows", "")
        held = metadata.get("of_rows", num_rows)
        if not table.is_dynamic and held != str(len(table)):
            raise ConfigError(self.path, f"table {table.name!r} has {held} rows, expected {len(table)}")
        if "of_rows" in metadata and not metadata.get("seed", "").removeprefix("-").isdecimal():
            raise FormatError(self.path, f"table {table.name!r}: got seed {metadata.get('seed')!r}, expected a number")
        return int(num_rows) if num_rows.isdecimal() else -1

    def _pieces(self, parse: Callable[[str], tuple[str, int] | None]) -> dict[str, list[FileEntry]]:
        """Return a map of each table to those of its files that `parse` accepts, in order."""
        pieces: dict[str, list[FileEntry]] = {}
        for entry in sorted(self._manifest.files, key=lambda entry: (len(entry.file), entry.file)):
            parsed = parse(entry.file)
            if parsed is not None:
                pieces.setdefault(parsed[0], []).append(entry)
        return pieces

    def _read(self, file: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        arrays, metadata = read_tensors(self.path / file, sha256=self._manifest.entry(file).sha256)
        return {name: as_tensor(array) for name, array in arrays.items()}, metadata


def _rows(tensors: Mapping[str, Tensor], first_key: int) -> Rows:
    """Return a piece of a table; one without keys holds those from `first_key` on."""
    weights = tensors[WEIGHTS]
    keys = tensors[KEYS] if KEYS in tensors else torch.arange(first_key, first_key + len(weights))
    return Rows(keys=keys, weights=weights, state=_named(STATE_PREFIX, tensors), uses=_named(USE_PREFIX, tensors))


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def load(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`; read and check its manifest and ``state.json``, the rest when requested.

    Raises:
        DataNotFoundError: `path` is no complete checkpoint.
        FormatError: A file is missing, damaged or of a newer version; the message names it.
    """
    manifest = read_manifest(path)
    state = _read_state(path / STATE, manifest.entry(STATE))
    if state["step"] != manifest.step:
        raise FormatError(path / MANIFEST, f"$.step is {manifest.step}, but {STATE} is of step {state['step']}")
    return Checkpoint(path, manifest, state)


def _read_state(path: Path, entry: FileEntry) -> dict[str, Any]:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise FormatError(path, f"damaged: its SHA-256 is not the one in {MANIFEST}")
    try:
        state = parse_json(content)
        rng = bytearray(base64.b64decode(str(state["rng"]), validate=True))
        return {"step": int(state["step"]), "progress": dict(state["progress"]), "rng": rng}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise FormatError(path, f"expected step, progress and rng ({shortened(repr(error))})") from None
