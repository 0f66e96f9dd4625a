# SPDX-License-Identifier: Apache-2.0
"""hugectr.data: the file system that holds the files of a job, their names, and their copy to a disk."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from terarec.errors import DataNotFoundError
from terarec.hugectr.enums import FileSystemType_t
from terarec.hugectr.errors import WrongInputError, as_hugectr_errors
from terarec.hugectr.objects import DataSourceParams
from terarec.io.directories import atomic_entries
from terarec.io.opening import copy_file
from terarec.io.remote import folder_and_name, is_remote, local_copy

Path_ = TypeVar("Path_")

__all__ = [
    "DataSource",
    "DataSourceParams",
]


# Paths of a job, behind hdfs_ and local_.
_PATHS = (
    "train_source", "train_filelist", "eval_source", "eval_filelist", "dense_model", "dense_opt_states",
    "sparse_model", "sparse_opt_states",
)  # fmt: skip
_WEB_ADDRESSES = (
    (r"https://(?P<bucket>[^/]+)\.s3\.[^/]+\.amazonaws\.com/(?P<key>.+)", "s3"),
    (r"https://s3\.[^/]+\.amazonaws\.com/(?P<bucket>[^/]+)/(?P<key>.+)", "s3"),
    (r"https://storage\.googleapis\.com/(?P<bucket>[^/]+)/(?P<key>.+)", "gs"),
)


def file_url(source: DataSourceParams, path: str) -> str:
    """Return `path` with the scheme of its file system, HDFS or a bucket.

    HugeCTR takes ``https://BUCKET.s3.REGION.amazonaws.com/KEY``, ``https://s3.REGION.amazonaws.com/BUCKET/KEY`` and
    ``https://storage.googleapis.com/BUCKET/KEY``, which are ``s3://BUCKET/KEY`` and ``gs://BUCKET/KEY``.
    """
    url = _complete(source, path)
    if is_remote(url):
        from terarec.formats.urls import allow_urls  # here: formats load Arrow

        allow_urls("/".join(url.split("/")[:3]))  # the script names it
    return url


def _complete(source: DataSourceParams, path: str) -> str:
    # A path with a scheme is complete, for any file system of the other paths.
    if source.source is FileSystemType_t.HDFS and "://" not in path:
        return f"hdfs://{source.server}:{source.port}/{path.removeprefix('/')}"
    for address, scheme in _WEB_ADDRESSES:
        match = re.fullmatch(address, path)
        if match:
            return f"{scheme}://{match['bucket']}/{match['key']}"
    return path


def model_home(source: DataSourceParams) -> str:
    """Return the folder that precedes the prefix of a snapshot; empty except in release 3.4."""
    side = "hdfs" if source.source is FileSystemType_t.HDFS else "local"
    return str(source.values().get(f"{side}_model_home", ""))


def stored_path(source: DataSourceParams, name: str, provided: Path_) -> Path_:
    """Return the path of the job's `name` on HDFS, if the form of release 3.4 has it, else the one `provided`."""
    if source.source is not FileSystemType_t.HDFS:
        return provided
    path_in_source: Path_ | None = source.values().get(f"hdfs_{name}")
    return path_in_source or provided


class DataSource:
    """Copier of the files of a job to the local disk before it starts, as in releases 3.4 to 3.8.

    Args:
        data_source_params: In the form of these releases.

    Raises:
        WrongInputError: The form of later releases, or lists of paths on both sides that differ in length.
    """

    def __init__(self, data_source_params: DataSourceParams) -> None:
        self._params = data_source_params
        self._pairs = _pairs(data_source_params)

    def move_to_local(self) -> None:
        """Copy each non-empty ``hdfs_*`` path to its ``local_*`` one; in folders, files of other names stay.

        Raises:
            FileCannotOpenError: A missing path, or cannot be written to.
        """
        for remote, local in self._pairs:
            with as_hugectr_errors("move_to_local"), local_copy(file_url(self._params, remote)) as source:
                _copy(source, Path(local))


def _pairs(params: DataSourceParams) -> list[tuple[str, str]]:
    """Return the paths to copy from and to."""
    if "use_hdfs" not in params.values():
        raise WrongInputError("DataSource", "got DataSourceParams of release 3.9 on, expected use_hdfs and paths")
    pairs: list[tuple[str, str]] = []
    for name in _PATHS:
        remote, local = (_listed(getattr(params, f"{side}_{name}")) for side in ("hdfs", "local"))
        if remote and local and len(remote) != len(local):
            raise WrongInputError("DataSource", f"got {len(remote)} hdfs_{name} and {len(local)} local_{name}")
        # Where one side is empty there is nothing to copy: the job uses the paths of the other.
        pairs += zip(remote, local, strict=False)
    return pairs


def _listed(paths: str | list[str]) -> list[str]:
    return [path for path in ([paths] if isinstance(paths, str) else paths) if path]


def _copy(source: Path, target: Path) -> None:
    """Copy a file to a file, or the entries of a folder into a folder."""
    if not source.exists():
        raise DataNotFoundError(source, "no such file or folder")
    folder, names = target.parent, {source: target.name}
    if source.is_dir():
        folder, names = target, {entry: entry.name for entry in source.iterdir()}
    # A job that starts again finds the copies of its first start, and replaces them.
    with atomic_entries(folder, replaceable=".*") as local:
        for entry, name in names.items():
            if entry.is_dir():
                shutil.copytree(entry, local / name, copy_function=copy_file)
            else:
                copy_file(entry, local / name)


@dataclass(frozen=True, slots=True)
class FileNames:
    """The files that ``save_params_to_files(prefix, iteration)`` writes; `prefix` is of a path or a URL."""

    prefix: str
    iteration: int

    @property
    def folder(self) -> str:
        """Folder of the files."""
        return folder_and_name(self.prefix)[0]

    @property
    def dense(self) -> str:
        """Name of the file of the layers' weights."""
        return f"{self._stem}_dense_{self.iteration}.model"

    @property
    def dense_states(self) -> str:
        """Name of the file of the layers' optimizer states."""
        return f"{self._stem}_opt_dense_{self.iteration}.model"

    def sparse(self, number: int) -> str:
        """Return the name of the rows of the embedding `number`."""
        return f"{self._stem}{number}_sparse_{self.iteration}.model"

    def sparse_states(self, number: int) -> str:
        """Return the name of the optimizer states of the embedding `number`."""
        return f"{self._stem}{number}_opt_sparse_{self.iteration}.model"

    @property
    def _stem(self) -> str:
        return folder_and_name(self.prefix)[1]
