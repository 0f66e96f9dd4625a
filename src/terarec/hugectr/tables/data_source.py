"""data.DataSourceParams: where files lie, in its form of 3.6 on and in that of 3.4 and 3.5."""

from __future__ import annotations

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
            since="3.6",
            meaning="kind of the file system",
        ),
        Parameter(name="server", kind=TEXT, default="localhost", since="3.6", meaning="name node, region or endpoint"),
        Parameter(name="port", kind=whole(0), default=9000, meaning="its port"),
    ),
)


def _path_row(name: str, kind: Kind, default: Any) -> Parameter:
    return Parameter(name=name, kind=kind, default=default, since="3.4", until="3.5", meaning="a path of a job's files")


def _paths(place: str) -> tuple[Parameter, ...]:
    texts = ("train_source", "train_filelist", "eval_source", "eval_filelist", "dense_model", "dense_opt_states")
    lists = ("sparse_model", "sparse_opt_states")
    return (
        *(_path_row(f"{place}_{name}", TEXT, "") for name in texts),
        *(_path_row(f"{place}_{name}", listed(TEXT), []) for name in lists),
    )


_NEW = {row.name for row in DATA_SOURCE_PARAMS.rows} - {"port"}


def _of_new_form(values: Mapping[str, Any]) -> Mapping[str, Any]:
    source = FileSystemType_t.HDFS if values["use_hdfs"] else FileSystemType_t.Local
    return {"source": source, "server": values["namenode"]}


DATA_SOURCE_PARAMS_3_4 = Table(
    name="data.DataSourceParams",
    meaning="a file system and a job's paths on both sides (3.4 and 3.5)",
    rows=(
        Parameter(name="use_hdfs", kind=TRUTH, default=False, since="3.4", until="3.5", meaning="HDFS, else local"),
        Parameter(name="namenode", kind=TEXT, default="localhost", since="3.4", until="3.5", meaning="its name node"),
        Parameter(name="port", kind=whole(0), default=9000, meaning="its port"),
        *_paths("hdfs"),
        *_paths("local"),
        _path_row("hdfs_model_home", TEXT, ""),
        _path_row("local_model_home", TEXT, ""),
    ),
    fits=lambda args, kwargs: bool(args and isinstance(args[0], bool)) or bool(kwargs and not _NEW & set(kwargs)),
    derive=_of_new_form,
)


class DataSourceParams(Record, forms=(DATA_SOURCE_PARAMS, DATA_SOURCE_PARAMS_3_4)):
    """A file system; its attributes may be set."""

    is_writable = True

    def url(self, path: str) -> str:
        """`path` as readers find it: a path on HDFS without a scheme gets this file system's."""
        if self.source is not FileSystemType_t.HDFS or "://" in path:
            return path
        return f"hdfs://{self.server}:{self.port}/{path.removeprefix('/')}"


def refusal_of_remote(params: DataSourceParams | None) -> str | None:
    """What to say when model files are to go to another file system than the local one; None when they are not."""
    if params is None or params.source is FileSystemType_t.Local:
        return None
    return f"data_source_params: got {params.source.name}, expected Local: model files are written to local paths"
