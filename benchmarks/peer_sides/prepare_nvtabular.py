# SPDX-License-Identifier: Apache-2.0
"""NVTabular on the CPU: one workflow, fitted and applied on a local Dask cluster of one process a core."""

from __future__ import annotations

from pathlib import Path

import dask
import nvtabular
import pandas
from distributed import Client, LocalCluster
from merlin.schema import Tags
from nvtabular import ops

from peer_sides.criteo_job import CATEGORIES, INTEGERS, MIN_COUNT, Counts, Job
from peer_sides.id_counts import id_counts

_PARTITION = "128MB"


class DaskWorkflow:
    """Implements `Side`. Numbers become ln(1 + max(0, x)): NVTabular has no operator that fits the shift."""

    version = f"nvtabular {nvtabular.__version__}, dask {dask.__version__}, pandas {pandas.__version__}"

    def __init__(self, threads: int) -> None:
        self.client = Client(LocalCluster(n_workers=threads, threads_per_worker=1, dashboard_address=None))

    def prepare(self, job: Job) -> None:
        numbers = INTEGERS >> ops.FillMissing(fill_val=0) >> ops.Clip(min_value=0) >> ops.LogOp()
        vocabularies = str(job.out / "vocabularies")
        ids = CATEGORIES >> ops.Categorify(freq_threshold=MIN_COUNT, out_path=vocabularies)
        label = ["label"] >> ops.AddTags([Tags.TARGET])
        workflow = nvtabular.Workflow(label + numbers + ids, client=self.client)
        workflow.fit(_lines(job.train, self.client))
        for part in (job.train, job.valid):
            workflow.transform(_lines(part, self.client)).to_parquet(str(job.out / part.stem))

    def counts(self, job: Job) -> Counts | None:
        return id_counts(sorted((job.out / job.train.stem).glob("*.parquet")), special=(1, 2))


def _lines(path: Path, client: Client) -> nvtabular.Dataset:
    types = {"label": "float32"} | dict.fromkeys(INTEGERS, "float32") | dict.fromkeys(CATEGORIES, "str")
    return nvtabular.Dataset(
        str(path),
        engine="csv",
        part_size=_PARTITION,
        client=client,
        sep="\t",
        header=None,
        names=list(types),
        dtype=types,
    )
