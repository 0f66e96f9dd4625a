"""What calls of `Model` take whose parameters are of their own."""

from __future__ import annotations

from terarec.hugectr.tables.data_source import DataSourceParams
from terarec.hugectr.tables.kinds import TEXT, instance, number, optional, whole
from terarec.hugectr.tables.table import Parameter, Table

FIT = Table(
    name="Model.fit",
    meaning="train, evaluate and save",
    rows=(
        Parameter(
            name="num_epochs", kind=whole(), default=0, since="3.0", meaning="times over the data, repeat_dataset=False"
        ),
        Parameter(name="max_iter", kind=whole(), default=2000, since="3.0", meaning="iterations, repeat_dataset=True"),
        Parameter(name="display", kind=whole(), default=200, since="3.0", meaning="iterations between messages"),
        Parameter(
            name="eval_interval", kind=whole(), default=1000, since="3.0", meaning="iterations between evaluations"
        ),
        Parameter(name="snapshot", kind=whole(), default=10000, since="3.0", meaning="iterations between snapshots"),
        Parameter(name="snapshot_prefix", kind=TEXT, default="", since="3.0", meaning="of their files' names"),
        Parameter(
            name="data_source_params",
            kind=optional(instance(DataSourceParams)),
            default=None,
            since="3.4",
            until="3.4",
            meaning="file system of the snapshots",
        ),
    ),
)
SET_LEARNING_RATE = Table(
    name="Model.set_learning_rate",
    meaning="the rate of the next iterations",
    rows=(Parameter(name="lr", kind=number(0.0), meaning="the rate"),),
)
