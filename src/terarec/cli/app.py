# SPDX-License-Identifier: Apache-2.0
"""The list of all commands, and their execution: an error becomes one line and an exit code.

A command is a frozen dataclass of options and a function that takes them. `Lazy` lists a command without loading it, so
that ``terarec --help`` loads none.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import signal
import sys
import threading
import traceback
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

from terarec import __version__
from terarec.cli.failures import EXIT_INTERRUPTED, Failure, failure_of
from terarec.errors import ConfigError
from terarec.user_code import place_of

if TYPE_CHECKING:
    from terarec.cli.options import OptionGroup

# Headings of the list of commands.
DATA, MODEL, SERVING, INSIDE = "Data", "Model", "Serving", "Diagnostics"
WORKFLOW, NAME = "WORKFLOW", "NAME"
_JSON = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the figures as one JSON object in the last line of stdout; readable output goes to stderr.",
    ),
]


class Command(TyperCommand):
    """A command that rejects an option given twice, unless it takes several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse like Typer, which would take the last value silently."""
        reject_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    """A group of commands that rejects a repeated option as `Command` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse like Typer, which would take the last value silently."""
        reject_repeated(self, ctx, args)
        return super().parse_args(ctx, args)


def reject_repeated(command: Any, ctx: Any, args: Sequence[str]) -> None:
    """Raise if an option of one value is given several times."""
    if not args or ctx.resilient_parsing:  # a shell completes a line that is not complete
        return
    # Click itself keeps the last value of an option; its parser alone knows how often each was typed.
    _, _, parameters = command.make_parser(ctx).parse_args(args=list(args))
    for parameter, times in Counter(parameters).items():
        if times > 1 and parameter.param_type_name == "option" and not parameter.multiple and not parameter.count:
            raise ConfigError(parameter.opts[0], f"got it {times} times, expected it once")


class WorkflowOrCommand(Group):
    """Passes an unknown command on as the first argument of the command `WORKFLOW`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Resolve like Click, but ``prepare avazu day.csv`` as ``prepare WORKFLOW avazu day.csv``."""
        # A preset or a file is an argument, which a group of Click cannot have next to its commands.
        is_command = self.get_command(ctx, args[0]) is not None
        return super().resolve_command(ctx, args if is_command else [WORKFLOW, *args])


class NameOrCommand(Group):
    """Passes an unknown command, and options before it, on as arguments of the command `NAME`."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Like Click, but ``workflow --out avazu.json avazu`` means ``workflow NAME --out avazu.json avazu``.
        # Here and not in `resolve_command`: Click would take options before the name for those of the group.
        is_own = not args or args[0] in ctx.help_option_names or args[0] in self.commands
        return super().parse_args(ctx, args if is_own else [NAME, *args])


class Lazy(Command):
    """A command in a list of commands; the module of its function is imported when it is called.

    Args:
        name: Name of the command.
        target: Its function below `terarec.cli`, as "module:function".
        summary: Its line in the list, and the head of its own help.
        panel: Heading in the list.
        describes: Names of further specs whose fields the options describe; an error in such a field names the option.
    """

    def __init__(
        self, name: str, target: str, summary: str, *, panel: str | None = None, describes: Sequence[str] = ()
    ) -> None:
        super().__init__(name, help=summary, rich_help_panel=panel)
        self._target = target
        self._describes = describes

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse `args` as those of the loaded command."""
        return self.load().make_context(info_name, args, parent=parent, **extra)

    def load(self) -> Any:
        """Import the function and make it a command; the dataclass of its first parameter declares the options."""
        # A name and not the function: importing all commands would take longer than most of them.
        module, _, function = self._target.partition(":")
        body = getattr(importlib.import_module(f"terarec.cli.{module}"), function)
        return _built(self.name or "", body, self.help or "", tuple(self._describes))


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of a command, from the dataclass that declares them.

    Attributes:
        type: The dataclass.
        parameters: Options by the field that they belong to: one, or those of an `OptionGroup`.
        groups: The fields of several options, and their types.
    """

    type: Any
    parameters: Mapping[str, Sequence[inspect.Parameter]]
    groups: Mapping[str, tuple[OptionGroup, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, options_type: Any) -> _Options:
        parameters: dict[str, list[inspect.Parameter]] = {}
        groups: dict[str, tuple[OptionGroup, Any]] = {}
        hints = typing.get_type_hints(options_type, include_extras=True)
        for item in dataclasses.fields(options_type):
            inner, *marks = typing.get_args(hints[item.name])
            # By its method: `OptionGroup` is in a module that loads all specs, which the list of commands does not
            # need.
            group = next((mark for mark in marks if hasattr(mark, "parameters")), None)
            if group is not None:
                groups[item.name] = (group, inner)
                parameters[item.name] = group.parameters(inner)
                continue
            default = inspect.Parameter.empty if item.default is dataclasses.MISSING else item.default
            parameters[item.name] = [
                inspect.Parameter(
                    item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[item.name]
                )
            ]
        return cls(type=options_type, parameters=parameters, groups=groups)

    def value(self, values: Mapping[str, Any]) -> Any:
        """Build the dataclass from the values of all options."""
        own = {name: values[name] for name in self.parameters if name not in self.groups}
        for name, (group, hint) in self.groups.items():
            own[name] = group.value(hint, {option.name: values[option.name] for option in self.parameters[name]})
        return self.type(**own)

    @property
    def described(self) -> set[str]:
        """Names of the specs that groups of options build."""
        return {hint.__name__ for _, hint in self.groups.values() if isinstance(hint, type)}


@cache
def _built(name: str, body: Callable[..., None], summary: str, describes: tuple[str, ...]) -> Any:
    from terarec.reports.text import Show
    from terarec.spec.checks import FieldError

    options = _Options.of(next(iter(typing.get_type_hints(body).values())))
    parameters = [parameter for group in options.parameters.values() for parameter in group]
    names = {parameter.name: _typed(parameter) for parameter in parameters}
    defaults = {parameter.name: parameter.default for parameter in parameters}
    known = {"", *describes, *options.described}

    def run(**values: Any) -> None:
        show = Show(as_json=values.pop("json"))
        try:
            body(options.value(values), show)
        # Only fields that this command's options describe: the same name in a file is not an option.
        except FieldError as error:
            if error.owner not in known:
                raise
            place = names.get(error.field, error.field)
            raise ConfigError(place, error.problem) from error
        except ConfigError as error:
            # An argument of this name may come from another option where this one was not given.
            if type(error) is not ConfigError or values.get(error.where) == defaults.get(error.where):
                raise
            raise ConfigError(names[error.where], error.problem) from error

    json_flag = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_JSON)
    # Typer learns the options from the signature, which stands in for one parameter a field.
    run.__signature__ = inspect.Signature([*parameters, json_flag])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*parameters, json_flag]}
    # Typer makes a command of an application alone; completion is an option of ``terarec`` itself.
    app = typer.Typer(add_completion=False)
    app.command(name, cls=Command, help=summary)(run)
    return typer.main.get_command(app)


def _typed(parameter: inspect.Parameter) -> str:
    """Return the option as the user types it."""
    declared = typing.get_args(parameter.annotation)[1]
    # Inside Annotated, Typer keeps the first of the declared names where a default would be.
    words = (declared.default, *(declared.param_decls or ()))
    # A flag with a negative form is declared as "--x/--no-x".
    flags = [word for word in words if isinstance(word, str) and word.startswith("--")]
    if flags:
        return flags[0].partition("/")[0]
    is_argument = isinstance(declared, typer.models.ArgumentInfo)
    return str(declared.metavar) if is_argument else f"--{parameter.name.replace('_', '-')}"


def _group(
    cls: type[Group], name: str, summary: str, commands: Sequence[Lazy], *, panel: str = DATA, **attributes: Any
) -> Group:
    return cls(name=name, help=summary, commands=list(commands), rich_help_panel=panel, **attributes)


def _commands() -> list[Any]:
    """Return all commands in the order of the work."""
    generate = [
        ("criteo", "Write logs in the Criteo layout: a label, 13 integers and 26 hexadecimal categories a line."),
        ("avazu", "Write clicks on mobile advertisements in Avazu's layout: train.csv."),
        ("rees46", "Write a shop's views, carts and purchases in REES46's layout: 2019-Oct.csv."),
        ("mind", "Write pages of a news site in MIND's layout: behaviors.tsv and news.tsv for two splits."),
        ("movielens", "Write ratings of films in MovieLens' layouts: ratings.csv and movies.csv."),
        ("adult", "Write people as in UCI's Adult: adult.data and adult.test."),
        ("amazon", "Write reviews in the layouts of the Amazon review data: JSON lines of reviews and of products."),
    ]
    prepare = [
        Lazy(
            "criteo",
            "prepare:prepare_criteo",
            "Criteo logs: logarithms of integers, ids of categories by frequency.",
            describes=["Categorify"],
        ),
        Lazy(
            "csv",
            "prepare:prepare_csv",
            "Any CSV or TSV: numbers standardized, ids of categories by frequency.",
            describes=["SourceSpec"],
        ),
        Lazy(
            WORKFLOW,
            "prepare:prepare_workflow",
            "Any logs by a workflow: your own, a fitted one, or a preset such as avazu.",
        ),
    ]
    return [
        _group(
            Group,
            "generate",
            "Write synthetic raw logs whose best reachable AUC is known.",
            [Lazy(name, f"data:{name}", summary) for name, summary in generate],
        ),
        _group(
            NameOrCommand,
            "workflow",
            "Write a workflow as JSON, to be edited: a preset, or a draft for unknown logs.",
            [
                Lazy(NAME, "data:workflow", "Write a preset workflow as JSON."),
                Lazy("draft", "data:draft", "Write a workflow for unknown logs: types and steps by a sample."),
            ],
            subcommand_metavar="NAME|draft ...",
        ),
        _group(
            WorkflowOrCommand,
            "prepare",
            "Turn raw logs into a data set: ids, numbers, shards, dataset.json.",
            prepare,
            subcommand_metavar="WORKFLOW|criteo|csv ...",
        ),
        Lazy(
            "convert",
            "data:convert",
            "Convert a data set to HugeCTR's files, such files to a data set, or HugeCTR's model to a run.",
            panel=DATA,
            describes=["RecordOptions", "SavedModel"],
        ),
        Lazy(
            "drift",
            "data:drift",
            "Compare two data sets column by column: new and missing values, shifts of the distributions.",
            panel=DATA,
        ),
        Lazy(
            "init-config",
            "train:init_config",
            "Write a complete, commented run description for a data set.",
            panel=MODEL,
            describes=["PythonModelSpec"],
        ),
        Lazy("plan", "plan:plan", "Estimate the memory of a training before it starts.", panel=MODEL),
        Lazy("train", "train:train", "Train a model on a data set; Ctrl-C leaves a checkpoint.", panel=MODEL),
        Lazy("evaluate", "score:evaluate", "Compute metrics of a trained model on a data set.", panel=MODEL),
        Lazy("calibrate", "score:calibrate", "Correct the probabilities of a trained model.", panel=MODEL),
        Lazy(
            "predict",
            "score:predict",
            "Write the scores of raw files or of a data set.",
            panel=MODEL,
        ),
        Lazy("export", "serving:export", "Write a trained model for another runtime.", panel=MODEL),
        Lazy(
            "reproduce",
            "train:reproduce",
            "Repeat a published result by its recipe and public data.",
            panel=MODEL,
            describes=["TrainingSpec"],
        ),
        Lazy(
            "serve",
            "serving:serve",
            "Score raw records over HTTP (Open Inference Protocol v2): with a run, or the models of a repository.",
            panel=SERVING,
            describes=["RepositorySpec"],
        ),
        Lazy(
            "promote",
            "repository:promote",
            "Make a run a version of a model repository, and let it answer.",
            panel=SERVING,
        ),
        Lazy("rollback", "repository:rollback", "Let an earlier version of a model answer again.", panel=SERVING),
        Lazy("models", "repository:models", "Show the models of a repository and their versions.", panel=SERVING),
        Lazy(
            "publish",
            "serving:publish",
            "Publish a run's checkpoints and deltas through Redis, Valkey or Kafka, as its training writes them.",
            panel=SERVING,
        ),
        Lazy(
            "recommend",
            "serving:recommend",
            "Write the best items for users or histories: retrieved by one model, ranked by another one.",
            panel=SERVING,
        ),
        _group(
            Group,
            "bench",
            "Measure what serves a model.",
            [
                Lazy(
                    "serve",
                    "bench:bench_serve",
                    "Measure latency and throughput of a model server, terarec's or Triton's, under load.",
                )
            ],
            panel=SERVING,
        ),
        Lazy(
            "inspect", "inspect:inspect", "Show what a data set, run, checkpoint, column or table holds.", panel=INSIDE
        ),
        Lazy("doctor", "inspect:doctor", "Show versions, hardware and active kernels; check the core.", panel=INSIDE),
        Lazy(
            "hugectr-alias",
            "inspect:hugectr_alias",
            "Let `import hugectr` find terarec in every process of this Python, notebooks included.",
            panel=INSIDE,
        ),
    ]


@dataclass
class Frame:
    """Settings of the global options for the handling of errors."""

    debug: bool = False


def _print_version(wanted: bool) -> None:
    if wanted:
        # Eager, so that it works without a command, which a group requires otherwise.
        print(f"terarec {__version__}")
        raise typer.Exit


# Error messages and help must read the same in a pipe and in a terminal, so Typer's own error panels stay off.
_terarec = typer.Typer(
    cls=Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands and groups inherit it
    pretty_exceptions_enable=False,
    no_args_is_help=False,
)


@_terarec.callback()
def _contents(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Recommender models with huge embedding tables: from raw click logs to served scores."""
    del version
    ctx.obj.debug = debug
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def command_line() -> Any:
    """Return ``terarec`` with all its commands, none of them loaded yet."""
    group: Any = typer.main.get_command(_terarec)
    for command in _commands():
        group.add_command(command)
    return group


def run(arguments: Sequence[str]) -> int:
    """Run ``terarec ARGUMENTS`` and return its exit code, without ending the process."""
    frame = Frame()
    if any(argument.startswith("--allow-import") for argument in arguments) and os.getcwd() not in sys.path:
        # As for a script there; last, so that nothing in it takes the place of an installed package.
        sys.path.append(os.getcwd())
    try:
        with _stopped_by_sigterm():
            # Not standalone: Click would print errors in its own form and end the process.
            result = command_line()(list(arguments), prog_name="terarec", obj=frame, standalone_mode=False)
        # A reader that has gone is noticed here rather than by Python at its end, which prints a traceback.
        sys.stdout.flush()
    except BaseException as error:
        # Rich leaves so when the reader of stdout has gone, and has dealt with stdout by then; Typer after it has
        # completed a line for a shell. Neither is a failure: `terarec --help | head` has shown what was requested.
        # A user's code that leaves so has ended the command.
        if isinstance(error, SystemExit) and place_of(error) is None:
            return 0
        failure = failure_of(error)
        if frame.debug:
            traceback.print_exc()
    else:
        # Typer's own way of reporting that --help has printed (0), that a shell is unknown to it (1), which it has
        # said, or that Ctrl-C was pressed (130).
        if not isinstance(result, int) or result != EXIT_INTERRUPTED:
            return result if isinstance(result, int) else 0
        failure = failure_of(KeyboardInterrupt())
    _report(failure, as_json="--json" in arguments)
    return failure.exit_code


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C in the block: a scheduler ends a command by SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    # The handler of SIGINT raises KeyboardInterrupt, on which all cleaning up is built.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(failure: Failure, *, as_json: bool) -> None:
    if failure.line is None:
        _drop_output()
        return
    from terarec.reports.text import print_json
    from terarec.spec.checks import printable

    # Neither stream may take what is left: a full disk, or a reader that has gone.
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
    with suppress(OSError):
        print(f"terarec: {printable(failure.line)}", file=sys.stderr, flush=True)
    if as_json:
        try:
            print_json({"error": failure.message, "type": failure.type, "where": failure.where})
            sys.stdout.flush()
        except OSError:
            _drop_output()


def _drop_output() -> None:
    """Send stdout to the null device: what is still buffered must not fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
