# SPDX-License-Identifier: Apache-2.0
"""Command ``terarec plan``: the memory of a training, or the placements of its tables on ranks, before it starts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terarec.cli.options import AllowImport, Force, TiersOption, check_unset, distinct_pairs, numbers_by_name
from terarec.errors import ConfigError
from terarec.reports.text import Show

if TYPE_CHECKING:
    import torch

    from terarec.dist import Ranks
    from terarec.dist.costs import MachineCosts
    from terarec.spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of ``terarec plan``."""

    config: Annotated[Path, typer.Argument(metavar="CONFIG.json|RUN", help="A run description, or a RUN.")]
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="A field of the description; repeatable.")
    ] = None
    tiers: TiersOption = None
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Limit of host memory; the available memory if unset.")
    ] = None
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Limit of GPU memory, of each rank; the free memory if unset.")
    ] = None
    rows: Annotated[
        list[str] | None,
        typer.Option(
            "--rows", metavar="TABLE=N", help="Expected rows of a dynamic table or of one in tiers; repeatable."
        ),
    ] = None
    ranks: Annotated[int | None, typer.Option(min=1, metavar="N", help="Place the tables on N ranks instead.")] = None
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks on each machine; all on one if unset.")
    ] = None
    rank_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Limit of a rank's memory for tables; none, or what a GPU has, if unset."),
    ] = None
    place: Annotated[
        list[str] | None,
        typer.Option(
            "--place", metavar="TABLE=KIND", help="Kind of a table's placement, such as row_wise; repeatable."
        ),
    ] = None
    sharding: Annotated[
        Path | None,
        typer.Option("--plan", metavar="PLAN.json", help="Estimate the costs of this plan instead of making one."),
    ] = None
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure the costs of rows and, under torchrun, links for five seconds.")
    ] = False
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes per second that a rank sends to other machines; 1.25 GB if unset."),
    ] = None
    local_bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes per second that a rank sends to ranks of its machine; 2 GB if unset."),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(metavar="PLAN.json", help="File for the placements, which terarec train --plan takes."),
    ] = None
    force: Force = False
    allow_import: AllowImport = None


_OF_RANKS = ("ranks_per_node", "rank_memory", "place", "sharding", "probe", "bandwidth", "local_bandwidth", "out")
"""Options that have no meaning without ``--ranks``."""


def plan(options: PlanOptions, show: Show) -> None:
    """Run ``terarec plan``; a run over its budget is an error after the tables were shown."""
    from terarec.cli.train import tier_changes
    from terarec.config import load_run
    from terarec.config.files import RUN_FILE
    from terarec.config.overrides import override, parse_assignments
    from terarec.spec import Tiers
    from terarec.spec.tiers import parse_size
    from terarec.train.devices import resolve_device
    from terarec.train.plan import plan_run
    from terarec.train.rehearsal import program_bytes

    check_unset({"--force": options.force and options.out is None}, "without --out")
    file = options.config / RUN_FILE if options.config.is_dir() else options.config
    base = load_run(file)
    # First, so that --set may change one of the fields.
    changes = {} if options.tiers is None else tier_changes(base, Tiers.parse(options.tiers))
    spec = override(base, changes | parse_assignments(options.assignments or ()))
    if options.ranks is not None:
        check_unset({"--memory": options.memory is not None}, "with --ranks, whose bound is --rank-memory")
        of_new = {"--place": bool(options.place), "--ranks-per-node": options.ranks_per_node is not None}
        check_unset({} if options.sharding is None else of_new, "with --plan")
        _plan_ranks(spec, options.ranks, options, show)
        return
    for name in _OF_RANKS:
        if getattr(options, name):
            shown = "plan" if name == "sharding" else name.replace("_", "-")
            raise ConfigError(f"--{shown}", "got it without --ranks, expected both")
    device = resolve_device(spec.training.device)
    check_unset({"--device-memory": options.device_memory is not None and device.type == "cpu"}, "without a GPU")
    memory = plan_run(
        spec,
        rows=numbers_by_name("--rows", options.rows or (), "TABLE=N"),
        host_bytes=None if options.memory is None else parse_size(options.memory, "--memory"),
        device=device,
        device_bytes=None if options.device_memory is None else parse_size(options.device_memory, "--device-memory"),
        program_bytes=program_bytes(),
        allow_import=options.allow_import or (),
    )
    figures = dataclasses.asdict(memory)
    show.table("Tables", figures["tables"])
    show.table(f"Tables with --tiers {memory.suggestion}", figures["placement"])
    show.result(f"Plan of {file}", figures)
    # Last: who exceeds a budget needs the tables to see by what.
    memory.check()


def _plan_ranks(spec: RunSpec, size: int, options: PlanOptions, show: Show) -> None:
    """Show, and write, the placements of the tables on ranks; under torchrun rank 0 does."""
    from terarec.apps.sharding import plan_sharding
    from terarec.dist import join, load_plan
    from terarec.io.files import check_new_file
    from terarec.kernels.environment import launch
    from terarec.spec import to_data
    from terarec.spec.tiers import parse_size
    from terarec.train.devices import select_device

    if options.out is not None:
        check_new_file(options.out, replace=options.force)
    plan_of_file = None if options.sharding is None else load_plan(options.sharding)
    device = select_device(spec.training.device, launch())
    # All ranks, since a probe of the links needs both ends; alone it is one rank.
    ranks = join({"run": to_data(spec), "ranks": size}, timeout=spec.training.rank_timeout, device=device)
    try:
        costs = _costs(options, ranks, device)
        device_bytes = _device_bytes(options, ranks, device)
        # A plan is computed and written once.
        if not ranks.is_first:
            return
    finally:
        ranks.close()
    rating = plan_sharding(
        spec,
        size,
        costs,
        plan=plan_of_file,
        ranks_per_node=options.ranks_per_node,
        rank_bytes=None if options.rank_memory is None else parse_size(options.rank_memory, "--rank-memory"),
        device_bytes=device_bytes,
        fixed=distinct_pairs("--place", options.place or (), "TABLE=KIND", last=True),
        rows=numbers_by_name("--rows", options.rows or (), "TABLE=N"),
        allow_import=options.allow_import or (),
    )
    tables, each = (list(map(dataclasses.asdict, rows)) for rows in (rating.tables, rating.ranks))
    show.table(
        "Tables", [{**row, "milliseconds": 1e3 * row.pop("seconds"), "reason": row.pop("reason")} for row in tables]
    )
    show.table("Ranks", each)
    if options.out is not None:
        rating.plan.save(options.out)
    figures = {
        "out": None if options.out is None else str(options.out),
        "world_size": size,
        "slowest_over_mean": rating.slowest_over_mean,
        "costs": dataclasses.asdict(costs),
        "costs_from": costs.source,
        "rank_bytes": rating.plan.rank_bytes,
        "tables": tables,
        "ranks": each,
        "plan": to_data(rating.plan),
    }
    show.result(f"Placements for {size} ranks", figures)


def _device_bytes(options: PlanOptions, ranks: Ranks, device: torch.device) -> int | None:
    """Return the memory of the GPU of each rank: what is given, or the least that is free on any; None on CPUs."""
    from terarec.spec.tiers import parse_size
    from terarec.train.devices import free_bytes

    if options.device_memory is not None:
        return parse_size(options.device_memory, "--device-memory")
    sizes = [size for size in ranks.gather("memory of devices", free_bytes(device)) if size is not None]
    return min(sizes, default=None)


def _costs(options: PlanOptions, ranks: Ranks, device: torch.device) -> MachineCosts:
    """Return the costs that the options give or ask to measure."""
    from terarec.apps.sharding import probe
    from terarec.dist.costs import GPU_COSTS, MachineCosts
    from terarec.spec.tiers import parse_size

    is_gpu = device.type != "cpu" or options.device_memory is not None
    costs = probe(ranks, device=device) if options.probe else GPU_COSTS if is_gpu else MachineCosts()
    overrides = {"bandwidth": options.bandwidth, "local_bandwidth": options.local_bandwidth}
    sizes = {name: size for name, size in overrides.items() if size is not None}
    changed = {name: float(parse_size(size, f"--{name.replace('_', '-')}")) for name, size in sizes.items()}
    if not changed:
        return costs
    # Figures state their origin: a measured cost and a typed one are not worth the same.
    words = " and ".join(f"{name.replace('_', ' ')} given" for name in changed)
    return dataclasses.replace(costs, **changed, source=f"{costs.source}, {words}")
