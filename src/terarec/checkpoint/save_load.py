"""Save and load checkpoints. The files are described in docs/formats.md."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terarec.checkpoint.directory import (
    DENSE,
    MANIFEST,
    OPTIMIZER,
    STATE,
    FileEntry,
    Manifest,
    keep_newest,
    read_manifest,
    staged,
    step_path,
    write_manifest,
)
from terarec.checkpoint.state import TrainState, as_tensor, flatten, unflatten
from terarec.checkpoint.table_files import TableFiles, write_container, write_table
from terarec.errors import ConfigError, FormatError
from terarec.formats import read_tensors
from terarec.io import write_bytes
from terarec.spec.codec import parse_json
from terarec.spec.quoting import shortened
from terarec.storage import Store


def save(directory: Path, state: TrainState, *, keep: int | None = None) -> Path:
    """Write `state` atomically as a new checkpoint below `directory`.

    Tables are streamed from their memory; no further memory worth counting is allocated. Of tables with a tier in files
    the changed rows are written there, and the checkpoint shares these files by links where the file system allows.

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
        write_manifest(checkpoint, _write_files(checkpoint, state))
    if keep is not None:
        keep_newest(directory, keep)
    return step_path(directory, state.step)


def _write_files(checkpoint: Path, state: TrainState) -> Manifest:
    files, row_files = [], []
    for table in state.tables.values():
        written, row_file = write_table(checkpoint, table)
        files += written
        row_files += [] if row_file is None else [row_file]
    files.append(write_container(checkpoint, DENSE, state.dense, {}))
    tensors, text = flatten(state.optimizer)
    files.append(write_container(checkpoint, OPTIMIZER, tensors, {"optimizer": text}))
    files.append(_write_state(checkpoint, state))
    return Manifest(step=state.step, files=tuple(files), row_files=tuple(row_files))


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

    def table_files(self) -> TableFiles:
        """Return the tables, to read them without a model."""
        return TableFiles(self.path, self._manifest)

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
        files = self.table_files()
        if set(files.names) != set(tables):
            raise ConfigError(self.path, f"holds the tables {sorted(files.names)}, expected {sorted(tables)}")
        for name in files.names:
            files.load(tables[name], with_state=with_state)

    def _read(self, file: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        arrays, metadata = read_tensors(self.path / file, sha256=self._manifest.entry(file).sha256)
        return {name: as_tensor(array) for name, array in arrays.items()}, metadata


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
