"""``terarec predict``: a score for every sample of a data set, or for every row of raw files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terarec.cli.checkpoint_option import CheckpointOption
from terarec.cli.shared_options import AllowImport, DeviceOption, Force
from terarec.cli.show import Show
from terarec.errors import ConfigError
from terarec.spec import BAD_INPUT_POLICIES, PrepareOptions

if TYPE_CHECKING:
    from terarec.etl.engine import Progress


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """What ``terarec predict`` takes."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="What terarec train wrote.")]
    raw: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RAW...", help="Raw files to score, directories, patterns or URLs; in the place of --data."
        ),
    ] = None
    out: Annotated[Path, typer.Option(help="File to write, a line per sample in order: .parquet, .csv or .jsonl.")]
    data: Annotated[Path | None, typer.Option(help="A prepared data set.")] = None
    split: Annotated[str | None, typer.Option(help="Which part of the data set; valid if unset.")] = None
    checkpoint: CheckpointOption = None
    keep: Annotated[
        str, typer.Option(metavar="A,B,...", help="Columns of the raw files, or of the data set, to write too.")
    ] = ""
    bad_input: Annotated[
        str,
        typer.Option(metavar="|".join(BAD_INPUT_POLICIES), help="What to do with what cannot be read in raw files."),
    ] = "raise"
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that read raw files.")] = None
    device: DeviceOption = None
    force: Force = False
    allow_import: AllowImport = None


def predict(options: PredictOptions, show: Show) -> None:
    """Write the scores of raw files or of a data set."""
    if (options.data is None) == (not options.raw):
        given = "both" if options.raw else "neither"
        raise ConfigError(f"got {given} of RAW and --data, expected raw files or a prepared data set")
    if options.data is not None:
        _predict_dataset(options, options.data, show)
    else:
        _predict_raw(options, options.raw or [], show)


def _predict_dataset(options: PredictOptions, data: Path, show: Show) -> None:
    from terarec.data import read_spec
    from terarec.train.devices import resolve_device
    from terarec.train.predict import predict as score

    _check_unset(options, "a data set", ("bad_input", "threads"))
    split = options.split or "valid"
    total = read_spec(data).num_rows(split)
    with show.progress("predicting", "samples") as progress:
        report = score(
            options.run,
            data,
            split,
            options.out,
            checkpoint=options.checkpoint,
            keep=_names(options.keep),
            replace=options.force,
            device=resolve_device(options.device or "auto"),
            progress=lambda done: progress(done, total),
            allow_import=options.allow_import or (),
        )
    _show(options, {"split": split, **dataclasses.asdict(report)}, show)


def _predict_raw(options: PredictOptions, raw: list[str], show: Show) -> None:
    from terarec.formats import check_new_file, check_suffix
    from terarec.serve import InferenceSession, score_files
    from terarec.train.devices import resolve_device
    from terarec.train.run_dir import check_run

    _check_unset(options, "raw files", ("split",))
    check_new_file(options.out, replace=options.force)  # before a large model is loaded
    check_suffix(options.out)
    check_run(options.run)
    session = InferenceSession.open(
        options.run,
        options.checkpoint,
        device=resolve_device(options.device or "auto"),
        allow_import=options.allow_import or (),
    )
    with show.progress("scoring", "MiB") as advance:

        def tell(progress: Progress) -> None:
            rate = f"{progress.rows_per_second:,.0f} rows/s"
            advance(progress.done_bytes >> 20, progress.total_bytes >> 20, rate=rate)

        report = score_files(
            session,
            raw,
            options.out,
            keep=_names(options.keep),
            options=PrepareOptions(
                bad_input=options.bad_input,  # type: ignore[arg-type]  # the options check the word
                threads=options.threads,
            ),
            replace=options.force,
            progress=tell,
        )
    for line in report.first_bad_input:
        show.line(line)
    _show(options, dataclasses.asdict(report), show)


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",")) if text else ()


def _check_unset(options: PredictOptions, what: str, names: tuple[str, ...]) -> None:
    for field in dataclasses.fields(options):
        if field.name in names and getattr(options, field.name) != field.default:
            raise ConfigError(f"--{field.name.replace('_', '-')}: has no meaning for {what}")


def _show(options: PredictOptions, figures: dict[str, Any], show: Show) -> None:
    from terarec.kernels import memory

    told = {"out": str(options.out), **figures, "peak_memory_bytes": memory.peak_bytes()}
    show.result(f"Scores in {options.out}", told)
