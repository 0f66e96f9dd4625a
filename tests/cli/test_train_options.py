# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
from pathlib import Path

import pytest

from terarec.cli.train import SETTINGS, run_spec
from terarec.config import save_run
from terarec.errors import ConfigError, DataNotFoundError
from terarec.spec import (
    AdaGradSpec,
    BinarySpec,
    DLRMSpec,
    ExponentialSchedule,
    FMSpec,
    GraphModelSpec,
    LRSpec,
    PythonModelSpec,
    RegressionSpec,
    RunSpec,
    SGDSpec,
    StaticTablesSpec,
    TrainingSpec,
    WideDeepSpec,
)
from tests.cli.conftest import train_options
from tests.errors import at
from tests.models.every import GRAPH
from tests.models.test_graph_runs import written

OUT = Path("run")


def test_data_alone_is_a_run_of_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_spec(train_options(out=OUT, data=Path("data"))) == RunSpec(data=str(tmp_path / "data"))


def test_every_flag_sets_its_field() -> None:
    spec = run_spec(
        train_options(
            out=OUT,
            data=Path("/d"),
            model="dlrm",
            epochs=3,
            batch_size=64,
            width=8,
            bottom="32-8",
            top="16,4",
            dense_optimizer="sgd",
            dense_lr=0.5,
            sparse_optimizer="adagrad",
            sparse_lr=0.25,
            precision="bf16",
            seed=9,
            threads=2,
        )
    )
    assert spec.model == DLRMSpec(width=8, bottom=(32, 8), top=(16, 4))
    assert spec.dense_optimizer == SGDSpec(lr=0.5)
    assert spec.sparse_optimizer == AdaGradSpec(lr=0.25)
    training = spec.training
    assert (training.epochs, training.batch_size, training.precision) == (3, 64, "bf16")
    assert (training.seed, training.threads) == (9, 2)


FLAGS = {
    "objective": "regression",
    "schedule": "exponential",
    "device": "cpu",
    "precision": "fp16",
    "loss_scale": "dynamic",
    "compile": True,
    "accumulate": 2,
    "clip_norm": 1.5,
    "metrics": "rmse,mae",
    "group": "user",
    "slices": "country,day",
    "monitor": "mae",
    "epochs": 3,
    "seed": 4,
    "model": "deepfm",
    "width": 6,
    "hidden": "8-4",
}
ASSIGNED = ["training.schedule.gamma=0.5", "training.freeze=bottom.*,top.*"]


def test_flags_a_file_and_assignments_describe_the_same_run(tmp_path: Path) -> None:
    by_flags = run_spec(train_options(out=OUT, data=Path("/d"), assignments=ASSIGNED, **FLAGS))
    assert by_flags.objective == RegressionSpec()
    assert by_flags.training == TrainingSpec(
        epochs=3,
        accumulate=2,
        seed=4,
        device="cpu",
        compile=True,
        precision="fp16",
        loss_scale="dynamic",
        clip_norm=1.5,
        freeze=("bottom.*", "top.*"),
        schedule=ExponentialSchedule(gamma=0.5),
        metrics=("rmse", "mae"),
        group="user",
        slices=("country", "day"),
        monitor="mae",
    )
    assignments = [f"{SETTINGS[name].path}={value}" for name, value in FLAGS.items()]
    assert run_spec(train_options(out=OUT, data=Path("/d"), assignments=[*assignments, *ASSIGNED])) == by_flags
    config = tmp_path / "run.json"
    save_run(by_flags, config)
    assert run_spec(train_options(out=OUT, config_file=config)) == by_flags
    assert run_spec(train_options(out=OUT, config=config)) == by_flags
    assert run_spec(train_options(out=OUT, config=config, assignments=["training.loss_scale=8"])).training == (
        dataclasses.replace(by_flags.training, loss_scale=8.0)
    )
    with pytest.raises(ConfigError, check=at("--config")):
        run_spec(train_options(out=OUT, config=config, config_file=config))


@pytest.mark.parametrize("kind", ["dnn", "wide_deep", "deepfm", "xdeepfm", "dcn", "dcn_v2", "autoint"])
def test_layers_and_first_weights_can_be_said_for_each_model(kind: str) -> None:
    """The settings of published results."""
    spec = run_spec(
        train_options(
            out=OUT,
            data=Path("/d"),
            model=kind,
            width=10,
            hidden="400-400-400",
            activation="prelu",
            batch_norm=True,
            dropout=0.2,
            dense_init="xavier_normal",
            table_init="normal",
            init_scale=1e-4,
            pooling="mean",
        )
    ).model
    assert not isinstance(spec, LRSpec | FMSpec | GraphModelSpec | PythonModelSpec | DLRMSpec)
    assert (spec.kind, spec.width, spec.hidden, spec.pooling) == (kind, 10, (400, 400, 400), "mean")
    assert (spec.activation, spec.batch_norm, spec.dropout, spec.init) == ("prelu", True, 0.2, "xavier_normal")
    assert spec.tables == StaticTablesSpec(initializer="normal", init_scale=1e-4)
    off = run_spec(train_options(out=OUT, data=Path("/d"), model=kind, batch_norm=False)).model
    assert not isinstance(off, LRSpec | FMSpec | GraphModelSpec | PythonModelSpec)
    assert not off.batch_norm


def test_the_graph_of_a_file_is_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    options = train_options(out=OUT, data=Path("/d"), model="graph", assignments=["model.file=graph.json"])
    assert run_spec(options).model == GraphModelSpec(graph=GRAPH)
    with pytest.raises(ConfigError, check=at("model")):
        run_spec(train_options(out=OUT, data=Path("/d"), model="graph"))


def test_width_alone_widens_the_bottom_of_dlrm_only() -> None:
    assert run_spec(train_options(out=OUT, data=Path("/d"), width=8)).model == DLRMSpec(width=8, bottom=(512, 256, 8))
    wide = run_spec(train_options(out=OUT, data=Path("/d"), model="wide_deep", width=4, hidden="9"))
    assert wide.model == WideDeepSpec(width=4, hidden=(9,))


def test_the_file_comes_first_then_flags_then_set(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    model = {"kind": "dlrm", "width": 4, "bottom": [8, 4], "top": [2]}
    config.write_text(json.dumps({"data": "d", "model": model, "training": {"epochs": 5, "seed": 1}}))
    assignments = ["training.epochs=7", "training.max_steps=10"]
    spec = run_spec(train_options(config=config, out=OUT, epochs=6, width=16, assignments=assignments))
    assert spec.data == str(tmp_path / "d")
    assert spec.model == DLRMSpec(width=16, bottom=(8, 16), top=(2,))
    assert (spec.training.epochs, spec.training.max_steps, spec.training.seed) == (7, 10, 1)


def test_a_resumed_run_is_described_by_itself(tmp_path: Path) -> None:
    before = RunSpec(data="/d", model=DLRMSpec(width=4, bottom=(8, 4), top=(2,)), sparse_optimizer=SGDSpec(lr=0.5))
    save_run(before, tmp_path / "run.json")
    assert run_spec(train_options(out=tmp_path, resume=True)) == before
    longer = run_spec(train_options(out=tmp_path, resume=True, epochs=6, data=Path("/moved")))
    training = dataclasses.replace(before.training, epochs=6)
    assert longer == dataclasses.replace(before, data="/moved", training=training)
    assert run_spec(train_options(out=tmp_path, data=Path("/d"))) == RunSpec(data="/d")
    with pytest.raises(ConfigError, check=at("nothing to train on")):
        run_spec(train_options(out=tmp_path / "none", resume=True))


def test_neither_file_nor_data_is_reported() -> None:
    with pytest.raises(ConfigError, check=at("nothing to train on", "neither CONFIG.json nor --data")):
        run_spec(train_options(out=OUT))
    with pytest.raises(DataNotFoundError):
        run_spec(train_options(out=OUT, config=Path("none.json")))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"model": "dcm"}, "model.kind: got 'dcm' (did you mean 'dcn'?), expected one of 'lr', 'fm'"),
        ({"model": "wide_deep", "top": "8"}, "model.top: unknown field, expected one of 'width', 'pooling'"),
        ({"batch_size": 0}, "training.batch_size: got 0"),
        ({"dense_optimizer": "rowwise_adagrad"}, "dense_optimizer.kind: got 'rowwise_adagrad'"),
        ({"bottom": "16-x"}, "model.bottom: got 'x', expected an integer"),
        ({"assignments": ["training.epochs"]}, "got 'training.epochs', expected path=value"),
        ({"assignments": ["training.x=1"]}, "training.x: unknown field"),
        ({"loss_scale": "dinamic"}, "training.loss_scale: got 'dinamic', expected a number above 0, or 'dynamic'"),
        ({"device": "gpu"}, "training.device: got 'gpu', expected 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"objective": "multi_class"}, "objective.classes: missing for the kind 'multi_class'"),
    ],
)
def test_a_wrong_flag_names_its_field(flags: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_spec(train_options(out=OUT, data=Path("/d"), **flags))
    assert expected in str(caught.value)


def test_weights_of_labels_are_an_option_of_the_binary_objective() -> None:
    """Finding P3: they could be set only together with the kind of the objective."""
    described = run_spec(train_options(out=OUT, data=Path("/d"), label_weights="1,0.5,0"))
    assert described.objective == BinarySpec(label_weights=(1.0, 0.5, 0.0))
