"""``terarec serve``: a model behind HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terarec.cli.checkpoint_option import CheckpointOption
from terarec.cli.shared_options import AllowImport, DeviceOption
from terarec.cli.show import Show


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What ``terarec serve`` takes."""

    run: Annotated[Path, typer.Argument(metavar="RUN", help="What terarec train wrote.")]
    port: Annotated[int, typer.Option(help="TCP port; 0 takes a free one.")] = 8000
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1"
    name: Annotated[str, typer.Option(help="The model's name in the URL.")] = "model"
    max_request_bytes: Annotated[int, typer.Option(help="Longest body of a request.")] = 32 * 2**20
    max_in_flight: Annotated[int, typer.Option(help="Most requests at once; others are answered with 503.")] = 64
    receive_timeout_seconds: Annotated[float, typer.Option(help="How long a client may take to send a request.")] = 30.0
    checkpoint: CheckpointOption = None
    device: DeviceOption = None
    allow_import: AllowImport = None


def serve(options: ServeOptions, show: Show) -> None:
    """Score raw records over HTTP (Open Inference Protocol v2)."""
    from terarec.serve import run
    from terarec.spec import ServingSpec
    from terarec.train.devices import describe_device, resolve_device

    spec = ServingSpec(
        name=options.name,
        host=options.host,
        port=options.port,
        max_request_bytes=options.max_request_bytes,
        max_in_flight=options.max_in_flight,
        receive_timeout_seconds=options.receive_timeout_seconds,
    )

    device = resolve_device(options.device or "auto")

    def ready(server: run.RunningServer) -> None:
        url = f"{server.url}/v2/models/{spec.name}"
        show.line(f"Serving {options.run} at {url}/infer; Ctrl-C stops.")
        show.json(
            {
                "url": server.url,
                "host": server.host,
                "port": server.port,
                "name": spec.name,
                "device": describe_device(device),
            }
        )

    run.serve(
        options.run,
        spec,
        ready,
        checkpoint=options.checkpoint,
        device=device,
        allow_import=options.allow_import or (),
    )
