# SPDX-License-Identifier: Apache-2.0
"""Serve a run by another library: ``python -m peer_sides.served_model <library> <run> <host> <port>``.

All of them call `InferenceSession.predict` for raw records in JSON, so that the servers alone differ. Those that join
requests to batches may do so as terarec does by default.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from terarec.serve import InferenceSession

MOST_RECORDS = 1024  # of a batch


def fastapi(run: str, host: str, port: int) -> None:
    """Serve ``POST /predict`` by FastAPI on uvicorn, in its threads."""
    import uvicorn
    from fastapi import FastAPI

    session = InferenceSession.open(Path(run))
    app = FastAPI()

    @app.get("/health")
    def health() -> None: ...

    @app.post("/predict")
    def predict(columns: dict[str, list[Any]]) -> dict[str, list[float]]:
        return {"score": session.predict(columns)[:, 0].tolist()}

    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)


def litserve(run: str, host: str, port: int) -> None:
    """Serve ``POST /predict`` by LitServe, whose process of the model joins requests."""
    import litserve as library

    from peer_sides.litserve_api import Api

    # It waits for a batch to be full for as long as the timeout; a request that is alone pays for it.
    api = Api(run, max_batch_size=64, batch_timeout=0.001)
    server = library.LitServer(api, accelerator="cpu", workers_per_device=1, track_requests=False)
    server.run(host=host, port=port, log_level="warning", generate_client_file=False, num_api_servers=1)


def mlserver(run: str, host: str, port: int) -> None:
    """Serve the Open Inference Protocol by MLServer, in one process, with its adaptive batching."""
    from mlserver import MLServer
    from mlserver.settings import ModelParameters, ModelSettings, Settings

    from peer_sides.mlserver_model import Model

    settings = Settings(
        host=host, http_port=port, grpc_port=port + 1, metrics_port=port + 2, parallel_workers=0, debug=False,
    )  # fmt: skip
    model = ModelSettings(
        name="model", implementation=Model, parameters=ModelParameters(uri=run),
        max_batch_size=MOST_RECORDS, max_batch_time=0.001,
    )  # fmt: skip
    asyncio.run(MLServer(settings).start([model]))


if __name__ == "__main__":
    {"fastapi": fastapi, "litserve": litserve, "mlserver": mlserver}[sys.argv[1]](*sys.argv[2:4], int(sys.argv[4]))
