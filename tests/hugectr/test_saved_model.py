# SPDX-License-Identifier: Apache-2.0
"""Files of a model, as HugeCTR or the facade saves them, become a RUN by ``terarec convert``."""

import dataclasses

import pytest
import torch

from terarec.config import load_run
from terarec.formats.hugectr.records import write_records
from terarec.hugectr.errors import FileCannotOpenError
from terarec.models.artifact import load_model
from terarec.spec import RecordsSpec
from terarec.spec.dataset import RecordSplit
from terarec.train import Run
from tests.cli.conftest import figures, rejected
from tests.hugectr import families
from tests.hugectr.planted import Planted, layout, write_norm, write_raw_async
from tests.hugectr.scripts import ADAM
from tests.hugectr.test_run import everything

STEPS, BATCH = 17, 300


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Data with its records.json, and a model that was trained on it and saved."""
    folder = tmp_path_factory.mktemp("saved")
    train, valid = write_norm(folder / "train", Planted(4_000)), write_norm(folder / "valid", Planted(1_000, seed=1))
    write_records(
        RecordsSpec(
            kind="norm",
            layout=layout(),
            splits={"train": RecordSplit(path=train, rows=4_000), "valid": RecordSplit(path=valid, rows=1_000)},
            label_names=("label",),
            dense_names=("I1", "I2", "I3"),
        ),
        folder / "records.json",
    )
    made = families.deepfm(train, valid, optimizer=ADAM, batchsize=BATCH)
    made.fit(max_iter=STEPS, display=0, eval_interval=0)
    made.graph_to_json(str(folder / "graph.json"))
    made.save_params_to_files(str(folder / "m"), STEPS)
    return folder, made


def flags(folder, out, *more):
    sparse = sorted(folder.glob("m*_sparse_*.model"))
    rows = [path for path in sparse if "_opt_" not in path.name]
    states = [path for path in sparse if "_opt_" in path.name]
    given = ["--records", folder / "records.json", "--dense", folder / f"m_dense_{STEPS}.model"]
    given += [part for path in rows for part in ("--sparse", path)]
    given += ["--dense-states", folder / f"m_opt_dense_{STEPS}.model"]
    given += [part for path in states for part in ("--sparse-states", path)]
    return ["convert", folder / "graph.json", "--to", "run", "--out", out, *given, *more]


def test_training_resumes_from_files_as_without_a_stop(files, tmp_path):
    folder, made = files
    numbers = ("--step", STEPS, "--batch-size", BATCH, "--lr", 0.01, "--seed", 5)
    reported = figures(*flags(folder, tmp_path / "run", *numbers))
    assert (reported["step"], reported["table_rows"]) == (
        STEPS,
        sum(len(t) for c in made.module.embeddings.values() for t in c.tables.values()),
    )
    spec = load_run(tmp_path / "run" / "run.json")
    longer = dataclasses.replace(spec, training=dataclasses.replace(spec.training, max_steps=2 * STEPS))
    run = Run(longer, tmp_path / "run")
    run.fit(resume=True)
    made.fit(max_iter=STEPS, display=0, eval_interval=0)
    optimizers = made._compiled("test").trainer.optimizers
    expected, found = everything(made.module, optimizers), everything(run.model, run.trainer.optimizers)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert figures("evaluate", tmp_path / "run", "--data", tmp_path / "run" / "records.json")["rows"] == 1_000


def test_what_does_not_fit_is_rejected(files, tmp_path):
    folder, _ = files
    out = tmp_path / "run"
    typed = ["convert", folder / "graph.json", "--to", "run", "--out", out, "--records", folder]
    rejected(*typed, where="--dense", problem="got none")
    rejected(*flags(folder, out, "--keysets"), where="--keysets", problem="--to run")
    rejected("convert", folder, "--to", "dataset", "--out", out, "--step", 3, where="--step", problem="--to dataset")
    rejected(*flags(folder, out, "--step", -1), where="--step", problem="got -1")
    rejected(
        "convert", folder / "none.json", *flags(folder, out)[2:], error=FileCannotOpenError, where=folder / "none.json"
    )
    assert not out.exists()


def test_the_dump_of_an_embedding_collection(tmp_path):
    train, valid = (write_raw_async(tmp_path / name, Planted(900, seed=seed)) for seed, name in enumerate("ab"))
    made = families.collection_dlrm(families.raw_async_reader(train, valid, 900, 900), batchsize=BATCH)
    made.fit(max_iter=5, display=0, eval_interval=0)
    made.graph_to_json(str(tmp_path / "graph.json"))
    made.save_params_to_files(str(tmp_path / "m"), 5)
    made.embedding_dump(str(tmp_path / "dump"))
    write_records(made.run_parts()[0], tmp_path / "records.json")
    given = ["--records", tmp_path, "--dense", tmp_path / "m_dense_5.model", "--sparse", tmp_path / "dump"]
    figures("convert", tmp_path / "graph.json", "--to", "run", "--out", tmp_path / "run", *given, "--batch-size", BATCH)
    found, expected = load_model(tmp_path / "run").model.state_dict(), made.module.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert figures("evaluate", tmp_path / "run", "--data", tmp_path / "run" / "records.json")["rows"] == 900
