# SPDX-License-Identifier: Apache-2.0
"""A11: a served request is cleaned as the file was, by the workflow that travels in the run."""

from pathlib import Path
from typing import Any

import pytest

from terarec.errors import ConfigError
from terarec.etl import prepare
from terarec.etl.ready import CsvOptions, csv_workflow
from terarec.etl.workflow import Workflow
from terarec.serve import InferenceSession
from terarec.spec import RunSpec, TrainingSpec, WideDeepSpec
from terarec.train import build
from tests.errors import at


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> InferenceSession:
    root: Path = tmp_path_factory.mktemp("cleaned")
    rows = "".join(f"{row % 2},c{row % 3},{row % 5},{row}\n" for row in range(60))
    (root / "log.csv").write_text(f"y,c,u,x\n{rows}1,?,?,?\n")
    options = CsvOptions(label="y", categorical=("c",), ids=("u",), dense=("x",))
    prepare(Workflow.of(csv_workflow(options)), [root / "log.csv"], root / "data")
    training = TrainingSpec(batch_size=8, epochs=1, threads=1, eval_split=None)
    build(RunSpec(data=str(root / "data"), model=WideDeepSpec(), training=training), root / "run").fit()
    return InferenceSession.open(root / "run")


@pytest.mark.parametrize(("c", "clean"), [(" c1 ", "c1"), ("?", None), (" ? ", None), ("\tc2\n", "c2"), ("", None)])
def test_a_request_is_cleaned_as_the_file(served: InferenceSession, c: str, clean: str | None) -> None:
    score = served.predict({"c": [c, "unseen"], "u": ["?", 1.0], "x": ["?", 2]})
    assert score[0] == served.predict({"c": [clean], "u": [None], "x": [None]})[0]
    assert score[0] != score[1]


@pytest.mark.parametrize(("name", "value"), [("u", True), ("u", 2**63), ("x", True), ("c", "\ud800"), ("c", True)])
def test_a_hostile_request_is_rejected(served: InferenceSession, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, check=at(f"column '{name}', row 0")):
        served.predict({"c": ["c1"], "u": [1], "x": [1.0], name: [value]})
