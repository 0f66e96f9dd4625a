# SPDX-License-Identifier: Apache-2.0
"""A trained RUN for others to score with: ``terarec export``, ``serve``, ``publish`` and ``recommend``."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terarec.cli.options import (
    AllowImport,
    CheckpointOption,
    DeviceOption,
    Force,
    NumbersOption,
    SpecFields,
    changed,
    check_unset,
    repeatable,
    spec_option,
)
from terarec.errors import ConfigError, FormatError, StorageError
from terarec.kernels.environment import let_threads_sleep
from terarec.reports.text import Show
from terarec.spec import (
    AccessSpec,
    BatchingSpec,
    ItemIndexSpec,
    KafkaTopicSpec,
    ServingSpec,
    TritonSpec,
    WatchingSpec,
)
from terarec.spec.checks import FieldError, quoted
from terarec.spec.serving_repository import RepositorySpec

if TYPE_CHECKING:
    import pyarrow as pa

    from terarec.export.artifact import ExportReport
    from terarec.export.table_rows import EmbeddingsReport, TableReport
    from terarec.serve import InputColumn
    from terarec.train.stopping import Interrupts


_OF_TRITON = ("form", "backend", "text", "tables")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of ``terarec export``."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="RUN directory of a trained model.")]
    out: Annotated[Path, typer.Option(help="Output directory.")]
    format: Annotated[
        str,
        typer.Option(
            "--to",
            "--format",
            metavar="onnx|torch|aotinductor|torchscript|triton|embeddings|parquet|npy|faiss",
            help="An ONNX file, a program for torch.export.load, one compiled for this machine, a trace, a model "
            "repository of Triton; or the vectors of the tables: embeddings is parquet.",
        ),
    ] = "onnx"
    triton: Annotated[TritonSpec, SpecFields(*_OF_TRITON)]
    no_tables: Annotated[
        bool, typer.Option("--no-tables", help="Leave the tables out; their vectors become inputs.")
    ] = False
    table: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Only table to write as parquet, npy or faiss.")
    ] = None
    numbers: NumbersOption
    data: Annotated[
        Path | None,
        typer.Option(
            help="A prepared data set, or HugeCTR's files: report the AUC of the exported model, and its change."
        ),
    ] = None
    split: Annotated[str, typer.Option(help="Split of --data.")] = "valid"
    checkpoint: CheckpointOption = None
    allow_import: AllowImport = None


def export(options: ExportOptions, show: Show) -> None:
    """Run ``terarec export``."""
    from terarec.kernels import memory
    from terarec.train.run_dir import check_run

    started = time.perf_counter()
    check_run(options.run)
    report = dataclasses.asdict(_exported(options))
    figures = {"run": str(options.run), "out": str(options.out), "format": options.format, **report}
    spent = {"seconds": time.perf_counter() - started, "peak_memory_bytes": memory.peak_bytes()}
    shown = {**figures, "file": str(report["file"]), **spent}
    # Reports of one model have a truth value here.
    if isinstance(report.get("tables"), tuple):  # of vectors of all tables
        shown["tables"] = [{**table, "file": str(table["file"])} for table in report["tables"]]
        show.table("tables", shown["tables"])
    show.figures(f"Exported {options.out}", shown)
    show.json(shown)


def _exported(options: ExportOptions) -> ExportReport | TableReport | EmbeddingsReport:
    from terarec.apps.triton import export_triton
    from terarec.export import export_embeddings, export_run, export_table
    from terarec.export.artifact import FORMATS
    from terarec.export.table_rows import TABLE_FORMATS

    allowed = options.allow_import or ()
    others: dict[str, bool] = {}
    if options.format != "triton":
        others = changed(options.triton, *_OF_TRITON)
    if options.format not in FORMATS:
        others["--no-tables"] = options.no_tables
    if options.format not in (*FORMATS, "triton"):
        # These formats have the vectors of tables alone.
        others |= {
            **changed(options.numbers, "row_type", "precision"),
            **changed(options, "data", "split"),
        }
    check_unset(others, f"for --to {options.format}")
    check_unset({} if options.data else changed(options, "split"), "without --data")
    # Named by its purpose, next to the formats of files.
    form = "parquet" if options.format == "embeddings" else options.format
    if options.table is not None:
        return export_table(
            options.run, options.table, options.out, format=form, checkpoint=options.checkpoint, allow_import=allowed
        )
    if form in TABLE_FORMATS:
        return export_embeddings(
            options.run, options.out, format=form, checkpoint=options.checkpoint, allow_import=allowed
        )
    if options.format == "triton":
        return export_triton(
            options.run,
            options.out,
            options.triton,
            checkpoint=options.checkpoint,
            numbers=options.numbers,
            data=options.data,
            split=options.split,
            allow_import=allowed,
        )
    return export_run(
        options.run,
        options.out,
        format=options.format,
        tables=not options.no_tables,
        checkpoint=options.checkpoint,
        numbers=options.numbers,
        data=options.data,
        split=options.split,
        allow_import=allowed,
    )


_KafkaConfigOption = Annotated[Path | None, spec_option("kafka_config", KafkaTopicSpec, "client_file", metavar="FILE")]


_LOAD_MODEL = "Model that is loaded at the start with --model-control explicit; * for all."


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of ``terarec serve``."""

    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="RUN directory of a trained model; omit it with --model-repository."),
    ] = None
    model_repository: Annotated[Path | None, spec_option("model_repository", RepositorySpec, "path", metavar="DIR")] = (
        None
    )
    # The following have the names of fields, by which errors find their options.
    control: Annotated[str | None, spec_option("model_control", RepositorySpec, "control")] = None
    load: Annotated[
        list[str] | None,
        spec_option("load_model", RepositorySpec, "load", metavar="NAME", summary=repeatable(_LOAD_MODEL)),
    ] = None
    poll_seconds: Annotated[float | None, spec_option("poll_seconds", RepositorySpec, "poll_seconds")] = None
    keep_versions: Annotated[int | None, spec_option("keep_versions", RepositorySpec, "keep_versions")] = None
    follow_runs: Annotated[bool, spec_option("follow_runs", RepositorySpec, "follow_runs", is_plain=True)] = False
    server: Annotated[
        ServingSpec,
        SpecFields(
            "name",
            "host",
            "port",
            "grpc_port",
            "grpc_library",
            "grpc_max_streams",
            "max_batch",
            "max_request_bytes",
            "max_in_flight",
            "receive_timeout_seconds",
            "keep_alive_seconds",
            "drain_seconds",
            "executor",
            "workers",
            "threads",
        ),
    ]
    access: Annotated[
        AccessSpec,
        SpecFields(
            "certificate",
            "key",
            "client_ca",
            "token_file",
            "admin_token_file",
            "admin_host",
            "admin_port",
            "allowed_hosts",
            "shared_memory",
        ),
    ]
    watching: Annotated[
        WatchingSpec,
        SpecFields(
            "access_log",
            "access_log_share",
            "record_directory",
            "record_share",
            "record_file_bytes",
            "record_file_seconds",
            "otlp_endpoint",
            "trace_share",
        ),
    ]
    drift: Annotated[
        bool,
        typer.Option(
            "--drift",
            help="Compare the inputs of a share of the requests (--record-share) with the training data, for the "
            "dashboard and the metrics.",
        ),
    ] = False
    drift_data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Data set that --drift compares with; that of the training.")
    ] = None
    absent_is_missing: Annotated[
        bool, spec_option("absent_is_missing", ServingSpec, "absent_is_missing", is_plain=True)
    ] = False
    batching: Annotated[
        BatchingSpec,
        SpecFields(
            "max_batch_size",
            "preferred_batch_sizes",
            "max_queue_delay_microseconds",
            "priority_levels",
            "default_priority_level",
            "default_timeout_seconds",
            "max_queue_size",
        ),
    ]
    target_p99: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time within which 99 of 100 requests are to be answered, such as 10ms: the time that requests wait "
            "for others, and the size of batches, are then found by measurement.",
        ),
    ] = None
    tables: Annotated[Path | None, spec_option("tables", ServingSpec, "tables", metavar="FILE.json")] = None
    recommend: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="JSON of what POST /v1/recommend answers: the items, the model that retrieves and the one that ranks.",
        ),
    ] = None
    stream: Annotated[
        str | None,
        typer.Option(
            metavar="URL|FILE",
            help="Stream from which checkpoints are received into RUN: kafka://HOST:PORT/TOPIC, "
            "redis://HOST:PORT/STREAM, or its JSON.",
        ),
    ] = None
    kafka_config: _KafkaConfigOption = None
    checkpoint: CheckpointOption = None
    device: DeviceOption = None
    numbers: NumbersOption
    allow_import: AllowImport = None


def serve(options: ServeOptions, show: Show) -> None:
    """Run ``terarec serve``."""
    if options.server.executor in ("onnxruntime", "openvino"):
        let_threads_sleep()  # theirs need the cores; before torch is imported
    from terarec.apps.drift.watch import ServedDrift
    from terarec.config.files import load_recommendations, load_served_tables, load_update_stream
    from terarec.serve import run
    from terarec.serve.listening import address_of
    from terarec.train.devices import describe_device, resolve_device

    source = _served(options)
    _check_needed(options)
    drift = partial(ServedDrift, options.drift_data, allow_import=options.allow_import or ())
    device = resolve_device(options.device or "auto")
    batching = options.batching
    if options.target_p99 is not None:
        try:
            batching = dataclasses.replace(batching, target_p99_seconds=_seconds("--target-p99", options.target_p99))
        except FieldError as error:
            raise ConfigError("--target-p99", error.problem) from None
    spec = dataclasses.replace(
        options.server,
        access=options.access,
        absent_is_missing=options.absent_is_missing,
        batching=batching,
        watching=options.watching,
    )
    if options.tables is not None:
        spec = dataclasses.replace(spec, tables=load_served_tables(options.tables))

    recommendations: run.OpenRecommendations | None = None
    if options.recommend is not None:
        from terarec.apps.served_recommendations import ServedRecommendations

        recommendations = partial(ServedRecommendations, load_recommendations(options.recommend))

    def ready(server: run.RunningServer) -> None:
        if options.run is not None:
            show.line(f"Serving {options.run} at {server.url}/v2/models/{spec.name}/infer; Ctrl-C stops.")
        else:
            show.line(f"Serving {options.model_repository} at {server.url}/v2/models/NAME/infer; Ctrl-C stops.")
        if server.grpc_port is not None:
            show.line(f"Serving gRPC at {address_of(server.host, server.grpc_port)}.")
        show.json(
            {
                "url": server.url,
                "host": server.host,
                "port": server.port,
                "grpc_port": server.grpc_port,
                "name": None if options.run is None else spec.name,
                "repository": None if options.model_repository is None else str(options.model_repository),
                "device": describe_device(device),
            }
        )

    with _logged():
        run.serve(
            source,
            spec,
            ready,
            checkpoint=options.checkpoint,
            device=device,
            allow_import=options.allow_import or (),
            numbers=options.numbers,
            stream=None if options.stream is None else load_update_stream(options.stream, options.kafka_config),
            drift=drift if options.drift else None,
            recommendations=recommendations,
        )


def _check_needed(options: ServeOptions) -> None:
    """Raise for an option without the one whose effect it changes."""
    server, access, watching = options.server, options.access, options.watching
    records = watching.record_directory is not None
    for needed, is_set, changing in (
        ("--drift", options.drift, changed(options, "drift_data")),
        ("--stream", options.stream is not None, changed(options, "kafka_config")),
        ("--record-directory", records, changed(watching, "record_file_bytes", "record_file_seconds")),
        ("--record-directory or --drift", records or options.drift, changed(watching, "record_share")),
        ("--otlp-endpoint", watching.otlp_endpoint is not None, changed(watching, "trace_share")),
        ("--access-log", watching.access_log is not None, changed(watching, "access_log_share")),
        ("--admin-port", access.admin_port is not None, changed(access, "admin_host")),
        ("--grpc-port", server.grpc_port is not None, changed(server, "grpc_library", "grpc_max_streams")),
    ):
        check_unset({} if is_set else changing, f"without {needed}")


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Print what the server notes, such as the version that answers from now on, with its time on stderr."""
    log, handler = logging.getLogger("terarec"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _served(options: ServeOptions) -> Path | RepositorySpec:
    """Return the run or the repository that the options name."""
    fields: dict[str, Any] = {
        "control": options.control,
        "load": tuple(options.load) if options.load else None,
        "poll_seconds": options.poll_seconds,
        "keep_versions": options.keep_versions,
        "follow_runs": options.follow_runs or None,
    }
    values = {name: value for name, value in fields.items() if value is not None}
    if options.model_repository is None:
        if options.run is None:
            raise ConfigError("RUN", "missing, expected a RUN, or --model-repository")
        flags = {"control": "--model-control", "load": "--load-model"}
        check_unset(
            {flags.get(name, f"--{name.replace('_', '-')}"): True for name in values}, "without --model-repository"
        )
        return options.run
    check_unset(
        {
            "--model-repository": options.run is not None,
            "--name": options.server.name != ServingSpec().name,
            "--stream": options.stream is not None,
            "--checkpoint": options.checkpoint is not None,
        },
        "with a RUN" if options.run is not None else "with --model-repository",
    )
    return RepositorySpec(path=str(options.model_repository), **values)


_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)", re.ASCII)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _seconds(option: str, text: str) -> float:
    match = _TIME.fullmatch(text)
    seconds = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not seconds:
        raise ConfigError(option, f"got {quoted(text)}, expected a time such as 10ms, 500us or 0.5s")
    return seconds


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Options of ``terarec publish``."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="RUN directory of a training, which may be running.")]
    to: Annotated[
        str,
        typer.Option(
            "--to",
            "--stream",
            metavar="URL|FILE",
            help="kafka://HOST:PORT/TOPIC, redis://HOST:PORT/STREAM, or the JSON of a stream.",
        ),
    ]
    kafka_config: _KafkaConfigOption = None
    every_seconds: Annotated[float, typer.Option(min=0.0, help="Seconds between polls for new checkpoints.")] = 1.0
    once: Annotated[bool, typer.Option("--once", help="Publish the present checkpoints, then end.")] = False


def publish(options: PublishOptions, show: Show) -> None:
    """Run ``terarec publish``."""
    from terarec.config.files import load_update_stream
    from terarec.serve import UpdatePublisher, open_stream
    from terarec.train.run_dir import check_run
    from terarec.train.stopping import Interrupts

    check_run(options.run)
    stream = open_stream(load_update_stream(options.to, options.kafka_config))
    # Without a thread of its own: this loop polls, so that it can show what fails.
    publisher = UpdatePublisher(options.run, stream, every_seconds=None)
    try:
        with Interrupts() as interrupts:
            publisher.poll()
            while not options.once and _sleep(options.every_seconds, interrupts):
                try:
                    check_run(options.run)  # one that is gone has no newer checkpoints
                    if publisher.poll():
                        show.line(f"Published {options.run} to step {publisher.statistics().step}; Ctrl-C stops.")
                # A damaged checkpoint or record stays one; a broker or a disk may come back.
                except FormatError:
                    raise
                except (StorageError, OSError) as error:
                    show.line(f"{error}; it is tried again")
    finally:
        stream.close()
    show.result(f"Published {options.run}", dataclasses.asdict(publisher.statistics()))


def _sleep(seconds: float, interrupts: Interrupts) -> bool:
    """Sleep, at most until a signal comes; return whether none has."""
    end = time.monotonic() + seconds
    while interrupts.received is None and (rest := end - time.monotonic()) > 0:
        time.sleep(min(rest, _SIGNAL_SECONDS))
    return interrupts.received is None


_SIGNAL_SECONDS = 0.2
"""Longest sleep before the next look for a signal, which does not end a sleep."""

# Bounds the memory for candidates and their scores, for any number of users.
_USERS = 1024  # scored at once


@dataclass(frozen=True, kw_only=True)
class RecommendOptions:
    """Options of ``terarec recommend``."""

    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="RUN directory of a model that retrieves: two towers, or one of sequences."),
    ]
    users: Annotated[Path, typer.Argument(metavar="USERS", help="Raw columns of users: .parquet, .csv or .jsonl.")]
    items: Annotated[Path, typer.Option(metavar="FILE", help="Raw columns of all items: .parquet, .csv or .jsonl.")]
    key: Annotated[str, typer.Option(metavar="COLUMN", help="Column that identifies items.")]
    out: Annotated[Path, typer.Option(help="File to write, a line per user and item: .parquet, .csv or .jsonl.")]
    ranker: Annotated[Path | None, typer.Option(metavar="RUN", help="The model that ranks the candidates.")] = None
    k: Annotated[int, typer.Option("--k", min=1, help="Number of items per user.")] = 10
    candidates: Annotated[int, typer.Option(min=1, help="Number of items retrieved for the ranker.")] = 200
    exclude: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column of USERS with lists of items to exclude, such as those seen."),
    ] = None
    allow: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File whose column --key has the only items to recommend.")
    ] = None
    index: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory in which the index of the items is cached; that of another checkpoint, "
            "other items or settings is replaced.",
        ),
    ] = None
    search: Annotated[ItemIndexSpec, SpecFields("method", "exact_items", "lists", "probes")]
    checkpoint: CheckpointOption = None
    device: DeviceOption = None
    force: Force = False
    allow_import: AllowImport = None


def recommend(options: RecommendOptions, show: Show) -> None:
    """Run ``terarec recommend``."""
    import pyarrow as pa

    from terarec.apps.recommend import Catalogue, Recommender
    from terarec.apps.retrieval_model import RetrievalModel
    from terarec.formats.table_file import check_suffix, table_file
    from terarec.io.files import check_new_file
    from terarec.serve import InferenceSession
    from terarec.train.devices import resolve_device
    from terarec.train.run_dir import check_run

    started = time.perf_counter()
    check_unset({} if options.ranker else changed(options, "candidates"), "without --ranker")
    of_others = {"exact": ("exact_items", "lists", "probes"), "lists": ("exact_items",), "auto": ()}
    method = options.search.method
    check_unset(changed(options.search, *of_others[method]), f"with --method {method}")
    check_new_file(options.out, replace=options.force)  # before large models are loaded
    check_suffix(options.out)
    device, allowed = resolve_device(options.device or "auto"), options.allow_import or ()
    check_run(options.run)
    if options.ranker is not None:
        check_run(options.ranker)
    # Both models are checked before the first one is loaded, which may take minutes.
    retrieval = RetrievalModel.open(options.run, options.checkpoint, device=device, allow_import=allowed)
    ranker = None
    if options.ranker is not None:
        ranker = InferenceSession.open(options.ranker, device=device, allow_import=allowed)
    inputs = [*retrieval.inputs, *(() if ranker is None else ranker.inputs)]
    catalogue = Catalogue(_read(options.items, inputs), options.key)
    allow = None if options.allow is None else _column(_read(options.allow, inputs), options.key, "--allow")
    users = _read(options.users, inputs)
    if options.exclude is not None:
        _column(users, options.exclude, "--exclude")
    recommender = Recommender.open(retrieval, catalogue, ranker=ranker, index=options.search, index_dir=options.index)
    # A column that is not there is rejected by the recommender, which knows what both models need.
    columns = [name for name in recommender.user_columns if name in users.column_names]
    rows: int = users.num_rows
    # The key as it was read, so that the result joins the file of the items.
    kind = catalogue.columns.schema.field(options.key).type
    schema = pa.schema([("row", pa.int64()), ("rank", pa.int64()), (options.key, kind), ("score", pa.float32())])
    recommended = 0
    with (
        table_file(options.out, schema, replace=options.force) as file,
        show.progress("recommending", "users") as advance,
    ):
        for begin in range(0, rows, _USERS):
            part = users.slice(begin, _USERS)
            answer = recommender.recommend(
                {name: part.column(name) for name in columns},
                options.k,
                candidates=options.candidates,
                exclude=None if options.exclude is None else _lists(part.column(options.exclude)),
                allow=allow,
            )
            row = [begin + number for number, items in enumerate(answer.items) for _ in items]
            rank = [place for items in answer.items for place in range(1, 1 + len(items))]
            items, scores = (_flat(lists) for lists in (answer.items, answer.scores))
            file.write_table(
                pa.Table.from_pydict(dict(zip(schema.names, (row, rank, items, scores), strict=True)), schema)
            )
            recommended += len(items)
            advance(begin + part.num_rows, rows)
    figures = {"out": str(options.out), "users": rows, "items": len(catalogue), "search": recommender.index.method}
    spent = {"recommended": recommended, "step": retrieval.step, "seconds": time.perf_counter() - started}
    show.result(f"Recommendations in {options.out}", {**figures, **spent})


def _read(path: Path, inputs: Iterable[InputColumn]) -> pa.Table:
    """Return the columns of a file; those of CSV are texts where a model reads texts."""
    from terarec.formats.table_file import read_table_file

    # A CSV has no types: "007" would be read as a number and lose its zeros.
    return read_table_file(path, texts=[column.name for column in inputs if column.kind == "string"])


def _column(table: pa.Table, name: str, option: str) -> list[Any]:
    if name not in table.column_names:
        raise ConfigError(option, f"got no column {name!r}, expected one of {', '.join(table.column_names)}")
    values: list[Any] = table.column(name).to_pylist()
    return values


def _lists(column: pa.ChunkedArray) -> list[list[Any]]:
    lists = column.to_pylist()
    # A missing list excludes nothing.
    if not all(value is None or isinstance(value, list) for value in lists):
        raise ConfigError("--exclude", f"got a column of type {column.type}, expected lists of items")
    return [value or [] for value in lists]


def _flat(lists: list[list[Any]]) -> list[Any]:
    return [value for values in lists for value in values]
