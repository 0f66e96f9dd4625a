# SPDX-License-Identifier: Apache-2.0
"""The run that the tests of serving train, for what is made from it; and two runs that recommend films."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest

from terarec.apps.recommend import Catalogue
from terarec.apps.synthetic.movielens import generate
from terarec.etl import prepare
from terarec.etl.ready import PRESETS
from terarec.etl.workflow import Workflow
from terarec.spec import DLRMSpec, PrepareOptions, RunSpec, TrainingSpec, TwoTowerSpec
from terarec.train.run import build
from tests.serve.conftest import graph_run, session, trained

__all__ = ["graph_run", "session", "trained"]


@dataclass(frozen=True)
class FilmRuns:
    """Two runs on ratings of films, and the films."""

    towers: Path
    ranker: Path
    films: pa.Table

    def catalogue(self) -> Catalogue:
        return Catalogue(self.films, "movieId")


@pytest.fixture(scope="session")
def film_runs(tmp_path_factory: pytest.TempPathFactory) -> FilmRuns:
    root = tmp_path_factory.mktemp("recommend")
    generate(root / "raw", rows=2_000, seed=3)
    workflow = Workflow.of(PRESETS["movielens"](min_count=1, history=5))
    options = PrepareOptions(tables={"movies": (str(root / "raw" / "movies.csv"),)}, threads=1)
    prepare(workflow, [root / "raw" / "ratings.csv"], root / "data", options)
    towers = TwoTowerSpec(
        user=("userId", "past_movies", "past_count"), item=("movieId", "genres"), width=8, hidden=(), vector_width=8
    )
    training = TrainingSpec(batch_size=64, max_steps=20, reader_threads=1)
    for name, model in (("towers", towers), ("ranker", DLRMSpec(width=4, bottom=(4,), top=(8,)))):
        build(RunSpec(data=str(root / "data"), model=model, training=training), root / name).fit()
    return FilmRuns(root / "towers", root / "ranker", pa.csv.read_csv(root / "raw" / "movies.csv"))
