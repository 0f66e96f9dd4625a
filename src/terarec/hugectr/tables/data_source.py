"""data.DataSourceParams: where files lie, in its form of 3.9 on and in that of 3.4 to 3.8."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from terarec.hugectr.enums import FileSystemType_t
from terarec.hugectr.tables.kinds import TEXT, TRUTH, Kind, listed, member, whole
from terarec.hugectr.tables.record import Record
from terarec.hugectr.tables.table import Parameter, Table

DATA_SOURCE_PARAMS = Table(
    name="data.DataSourceParams",
    meaning="a file system",
    rows=(
        Parameter(
            name="source",
            kind=member(FileSystemType_t),
            default=FileSystemType_t.Local,
            since="3.9",
            meaning="kind of the file system",
        ),
        Parameter(name="server", kind=TEXT, default="localhost", since="3.9", meaning="name node, region or endpoint"),
        Parameter(name="port", kind=whole(0), default=9000, meaning="its port"),
    ),
)


def _path_row(name: str, kind: Kind, default: Any) -> Parameter:
    return Parameter(name=name, kind=kind, default=default, since="3.4", until="3.4", meaning="a path of a job's files")


_ONE_PATH = ("train_source", "train_filelist", "eval_source", "eval_filelist", "dense_model", "dense_opt_states")
_MANY_PATHS = ("sparse_model", "sparse_opt_states")
PATHS = (*_ONE_PATH, *_MANY_PATHS)
"""What the names of paths are, behind ``hdfs_`` and ``local_``."""


def _paths(place: str) -> tuple[Parameter, ...]:
    return (
        *(_path_row(f"{place}_{name}", TEXT, "") for name in _ONE_PATH),
        *(_path_row(f"{place}_{name}", listed(TEXT), []) for name in _MANY_PATHS),
    )


_NEW = {row.name for row in DATA_SOURCE_PARAMS.rows} - {"port"}


def _of_new_form(values: Mapping[str, Any]) -> Mapping[str, Any]:
    source = FileSystemType_t.HDFS if values["use_hdfs"] else FileSystemType_t.Local
    return {"source": source, "server": values["namenode"]}


DATA_SOURCE_PARAMS_3_4 = Table(
    name="data.DataSourceParams",
    meaning="HDFS or not (3.4 to 3.8), and a job's paths on both sides (3.4)",
    rows=(
        Parameter(name="use_hdfs", kind=TRUTH, default=False, since="3.4", until="3.8", meaning="HDFS, else local"),
        Parameter(name="namenode", kind=TEXT, default="localhost", since="3.4", until="3.8", meaning="its name node"),
        Parameter(name="port", kind=whole(0), default=9000, meaning="its port"),
        *_paths("hdfs"),
        *_paths("local"),
        _path_row("hdfs_model_home", TEXT, ""),
        _path_row("local_model_home", TEXT, ""),
    ),
    fits=lambda args, kwargs: bool(args and isinstance(args[0], bool)) or bool(kwargs and not _NEW & set(kwargs)),
    derive=_of_new_form,
)


_WEB_ADDRESSES = (
    (r"https://(?P<bucket>[^/]+)\.s3\.[^/]+\.amazonaws\.com/(?P<key>.+)", "s3"),
    (r"https://s3\.[^/]+\.amazonaws\.com/(?P<bucket>[^/]+)/(?P<key>.+)", "s3"),
    (r"https://storage\.googleapis\.com/(?P<bucket>[^/]+)/(?P<key>.+)", "gs"),
)


class DataSourceParams(Record, forms=(DATA_SOURCE_PARAMS, DATA_SOURCE_PARAMS_3_4)):
    """A file system; its attributes may be set."""

    is_writable = True

    @property
    def model_home(self) -> str:
        """What goes before the prefix of a snapshot; empty but in release 3.4."""
        return str(self.values().get(f"{self._side}_model_home", ""))

    def stored(self, name: str, given: Any) -> Any:
        """Where release 3.4's form says that the job's `name` lies on HDFS, or else what was `given`."""
        return (self._side == "hdfs" and self.values().get(f"hdfs_{name}")) or given

    @property
    def _side(self) -> str:
        return "hdfs" if self.source is FileSystemType_t.HDFS else "local"

    def url(self, path: str) -> str:
        """`path` as terarec finds it: one on HDFS without a scheme gets this file system's, a bucket's web address its.

        HugeCTR takes ``https://BUCKET.s3.REGION.amazonaws.com/KEY``, ``https://s3.REGION.amazonaws.com/BUCKET/KEY`` and
        ``https://storage.googleapis.com/BUCKET/KEY``, which are ``s3://BUCKET/KEY`` and ``gs://BUCKET/KEY``.
        """
        if self.source is FileSystemType_t.HDFS and "://" not in path:
            return f"hdfs://{self.server}:{self.port}/{path.removeprefix('/')}"
        for address, scheme in _WEB_ADDRESSES:
            found = re.fullmatch(address, path)
            if found:
                return f"{scheme}://{found['bucket']}/{found['key']}"
        return path
