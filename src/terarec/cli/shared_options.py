"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

AllowImport = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-import", metavar="PACKAGE", help="A package whose code the workflow or the model may name; repeatable."
    ),
]
"""What is not allowed by it is refused when a workflow is read, or a model is built."""

Force = Annotated[bool, typer.Option("--force", help="Replace what is at --out.")]
"""Without it nothing that is there is replaced."""

DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="auto|cpu|cuda|cuda:N", help="Where the model is; auto takes a GPU.")
]
"""Checked by the spec, or by `terarec.train.devices.resolve_device`."""

MetricsOption = Annotated[
    str | None, typer.Option("--metrics", metavar="auc,logloss,...", help="Metrics of evaluations by name.")
]
GroupOption = Annotated[
    str | None,
    typer.Option("--group", metavar="COLUMN", help="Column by which gauc and ranking metrics group samples."),
]
SlicesOption = Annotated[
    str | None, typer.Option("--slices", metavar="A,B,...", help="Columns for whose values metrics are computed, too.")
]
