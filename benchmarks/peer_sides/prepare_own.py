# SPDX-License-Identifier: Apache-2.0
"""The sides of prepare.py that run in terarec's own interpreter."""

from __future__ import annotations

import importlib

import prepare

from peer_sides.criteo_job import Counts, Job
from peer_sides.id_counts import id_counts


class OwnSide:
    """Implements `Side` by a side of prepare.py."""

    name: str
    package: str

    def __init__(self, threads: int) -> None:
        self.version = f"{self.package} {importlib.import_module(self.package).__version__}"
        prepare.load_side(self.name)

    def prepare(self, job: Job) -> None:
        prepare.SIDES[self.name](job.whole, job.out / "prepared")

    def counts(self, job: Job) -> Counts | None:
        return None


class Terarec(OwnSide):
    """Run the job by terarec."""

    name, package = "terarec", "terarec"

    def counts(self, job: Job) -> Counts | None:
        return id_counts(sorted((job.out / "prepared" / "train").glob("*.parquet")), special=(0, 1))


class Polars(OwnSide):
    """Run the job by Polars."""

    name, package = "Polars", "polars"

    def counts(self, job: Job) -> Counts | None:
        return id_counts([job.out / "prepared" / "train.parquet"], special=(0, 1))


class PolarsScan(OwnSide):
    """Only parse the log."""

    name, package = "Polars scan", "polars"


class PyArrowScan(OwnSide):
    """Only parse the log."""

    name, package = "pyarrow.csv scan", "pyarrow"


class Bytes(OwnSide):
    """Only read the bytes."""

    name, package = "reading the bytes", "terarec"
