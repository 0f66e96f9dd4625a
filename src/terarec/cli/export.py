"""``terarec export``: a trained model as a file of another runtime."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terarec.cli.checkpoint_option import CheckpointOption
from terarec.cli.shared_options import AllowImport
from terarec.cli.show import Show


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What ``terarec export`` takes."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="What terarec train wrote.")]
    out: Annotated[Path, typer.Option(help="Directory to make.")]
    format: Annotated[
        str, typer.Option(metavar="onnx|torch", help="An ONNX file, or a program for torch.export.load.")
    ] = "onnx"
    no_tables: Annotated[
        bool, typer.Option("--no-tables", help="Leave the tables out; the vectors that they give are inputs then.")
    ] = False
    checkpoint: CheckpointOption = None
    allow_import: AllowImport = None


def export(options: ExportOptions, show: Show) -> None:
    """Write a trained model as an ONNX file or a torch program."""
    from terarec.export import export_run
    from terarec.kernels import memory
    from terarec.train.run_dir import check_run

    started = time.perf_counter()
    check_run(options.run)
    report = export_run(
        options.run,
        options.out,
        format=options.format,
        tables=not options.no_tables,
        checkpoint=options.checkpoint,
        allow_import=options.allow_import or (),
    )
    figures = {"run": str(options.run), "out": str(options.out), "format": options.format, **dataclasses.asdict(report)}
    spent = {"seconds": time.perf_counter() - started, "peak_memory_bytes": memory.peak_bytes()}
    show.result(f"Exported {options.out}", {**figures, "file": str(report.file), **spent})
