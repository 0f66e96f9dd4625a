# SPDX-License-Identifier: Apache-2.0
"""The paths of those who watch a server: ``/metrics``, which Prometheus scrapes, ``/drift`` and the page ``/``."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from dataclasses import asdict
from importlib import resources

from terarec.serve.http.messages import Request, Response, json_response
from terarec.serve.http.routes import Route, Routes
from terarec.serve.input_drift import DriftWatch, drift_of_served
from terarec.serve.metrics import CONTENT_TYPE, Metrics
from terarec.serve.models import ServedModels


def add_metrics(routes: Routes, metrics: Metrics) -> None:
    """Add ``/metrics``."""

    async def scrape(_: Request) -> Response:
        # In a thread, since it reads files where models follow a trainer.
        return Response(await asyncio.to_thread(metrics.text), media_type=CONTENT_TYPE)

    routes.add(Route("GET", "/metrics", scrape, "index"))


def add_drift(routes: Routes, drift: DriftWatch | None, models: ServedModels) -> None:
    """Add ``/drift``, the last comparisons of records with the training data; null where nothing is compared."""

    async def read(_: Request) -> Response:
        found = None if drift is None else [asdict(found) for found in drift_of_served(drift, models)]
        return json_response({"models": found})

    routes.add(Route("GET", "/drift", read, "index"))


def add_dashboard(routes: Routes) -> None:
    """Add ``/``. The page has no data: its script asks the other paths, with a token where they need one."""
    page = resources.files("terarec.serve.http").joinpath("dashboard.html").read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing but this script runs, whatever the names of models and features hold.
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    response = Response(
        page.encode(),
        media_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"},
    )

    async def dashboard(_: Request) -> Response:
        return response

    routes.add(Route("GET", "/", dashboard, "open"))
