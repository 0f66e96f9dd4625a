# SPDX-License-Identifier: Apache-2.0
"""A promoted version is a copy of its run that serves by itself, and appears complete or not at all."""

import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from terarec.apps.promotion import GOLDEN_RECORDS, promote
from terarec.config import load_run
from terarec.errors import ConfigError, DataNotFoundError, FormatError, NoSpaceError
from terarec.io.opening import link_or_copy, sha256_of
from terarec.models.artifact import load_model
from terarec.serve import InferenceSession, ServedTables
from terarec.serve.golden import GoldenRecords
from terarec.serve.repository import ModelRepository
from terarec.spec import DLRMSpec, DynamicTablesSpec, ParameterServerSpec, RowFileSpec, RunSpec, Tiers, TrainingSpec
from terarec.spec.serving_repository import PromotionSpec
from terarec.train.run import build
from tests.errors import at
from tests.processes import Python
from tests.serve.conftest import TrainedRun
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def chain(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of dynamic tables: a base at step 2, deltas to step 8, and another base at step 10."""
    spec = RunSpec(
        data=str(trained.data),
        model=DLRMSpec(width=4, bottom=(8, 4), top=(8,), tables=DynamicTablesSpec()),
        training=TrainingSpec(
            batch_size=128, max_steps=10, reader_threads=1, checkpoint_every=10, delta_every=2, keep_checkpoints=10
        ),
    )
    path = tmp_path_factory.mktemp("chain") / "run"
    build(spec, path).fit()
    return path


def copied(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to))


def test_a_version_serves_without_its_run(trained: TrainedRun, tmp_path: Path) -> None:
    run = copied(trained.path, tmp_path / "run")
    expected = InferenceSession.open(run).predict(trained.records(0, 50))
    report = promote(run, tmp_path / "models", "shop")
    assert (report.version, report.step, report.golden_records) == (1, 16, GOLDEN_RECORDS)
    # Links take their space once, and stay when the run goes.
    assert report.linked_bytes > report.bytes / 2
    shutil.rmtree(run)
    assert np.array_equal(InferenceSession.open(report.path).predict(trained.records(0, 50)), expected)


def test_a_version_names_its_run_its_data_and_its_last_evaluation(trained: TrainedRun, tmp_path: Path) -> None:
    report = promote(trained.path, tmp_path, "shop")
    described = ModelRepository(tmp_path).known("shop").described(1)
    assert described is not None
    assert (described.run, described.model, described.step, described.data) == ("run", "dlrm", 16, "criteo")
    assert (described.metrics_step, described.metrics_split) == (16, "valid")
    assert set(described.metrics) == {"auc", "logloss"}
    assert described.files["run.json"] == sha256_of(report.path / "run.json")
    assert {"dataset/dataset.json", "golden.safetensors", "dataset/workflow/workflow.json"} <= set(described.files)
    tables = sum(column.rows or 0 for column in load_model(trained.path)[2].categorical)
    assert described.memory_bytes > tables * 4 * 4
    assert described.follows is None


def test_golden_records_have_the_scores_of_the_run(trained: TrainedRun, tmp_path: Path) -> None:
    report = promote(trained.path, tmp_path, "shop")
    golden = GoldenRecords.read(report.path / "golden.safetensors")
    expected = InferenceSession.open(trained.path).predict(trained.records(0, GOLDEN_RECORDS))
    assert np.allclose(golden.scores, expected, atol=1e-6)
    assert golden.check(InferenceSession.open(trained.path).score_batch) == 0.0


def test_samples_of_data_without_a_validation_split_are_those_of_its_first(trained: TrainedRun, tmp_path: Path) -> None:
    day = Path(shutil.copytree(trained.data, tmp_path / "day"))
    described = json.loads((day / "dataset.json").read_text())
    del described["dataset"]["splits"]["valid"]
    (day / "dataset.json").write_text(json.dumps(described))
    report = promote(trained.path, tmp_path / "models", "shop", data=day)
    golden = GoldenRecords.read(report.path / "golden.safetensors")
    assert golden.check(InferenceSession.open(trained.path).score_batch) == 0.0
    with pytest.raises(ConfigError, match="has no split 'valid'"):
        promote(trained.path, tmp_path / "models", "shop", PromotionSpec(split="valid"), data=day)


def test_a_version_has_the_chain_of_deltas_of_its_checkpoint(chain: Path, trained: TrainedRun, tmp_path: Path) -> None:
    report = promote(chain, tmp_path, "shop", checkpoint=4)
    assert report.step == 4
    assert sorted(path.name for path in (report.path / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    expected = InferenceSession.open(chain, 4).predict(trained.records(0, 20))
    assert np.array_equal(InferenceSession.open(report.path).predict(trained.records(0, 20)), expected)


@pytest.mark.slow
def test_a_run_with_tables_in_files_can_be_promoted(trained: TrainedRun, tmp_path: Path) -> None:
    spec = load_run(trained.path / "run.json")
    assert isinstance(spec.model, DLRMSpec)
    tiers = Tiers(device="1MiB", host="16KB", file=str(tmp_path / "tiers"))
    model = replace(spec.model, tables=replace(spec.model.tables, tiers=tiers))
    training = replace(spec.training, max_steps=4)
    build(replace(spec, model=model, training=training), tmp_path / "run").fit()
    report = promote(tmp_path / "run", tmp_path / "models", "shop")
    session = InferenceSession.open(tmp_path / "run")
    expected = session.predict(trained.records(0, 20))
    # The working files of the tables that scored the samples are not part of it.
    names = {"checkpoints", "dataset", "golden.safetensors", "run.json", "version.json"}
    assert {path.name for path in report.path.iterdir()} == names
    assert np.array_equal(InferenceSession.open(report.path).predict(trained.records(0, 20)), expected)


@pytest.mark.slow
def test_samples_are_scored_from_tiers_on_request(trained: TrainedRun, tmp_path: Path) -> None:
    promote(trained.path, tmp_path / "models", "shop")
    tables = ServedTables(server=ParameterServerSpec(tiers=(RowFileSpec(path=str(tmp_path / "rows")),)))
    report = promote(trained.path, tmp_path / "models", "shop", tables=tables)
    assert list((tmp_path / "rows").iterdir())
    first, second = (GoldenRecords.read(report.path.parent / str(n) / "golden.safetensors") for n in (1, 2))
    assert np.array_equal(first.scores, second.scores)


def test_what_cannot_be_promoted_leaves_nothing(trained: TrainedRun, tmp_path: Path) -> None:
    models = tmp_path / "models"
    with pytest.raises(DataNotFoundError, check=at(tmp_path / "none")):
        promote(tmp_path / "none", models, "shop")
    with pytest.raises(ConfigError, check=at(trained.path / "checkpoints", "no checkpoint of step 7")):
        promote(trained.path, models, "shop", checkpoint=7)
    with pytest.raises(ConfigError, check=at("PromotionSpec.shadow", "no version answers yet")):
        promote(trained.path, models, "shop", PromotionSpec(shadow=0.5))
    with pytest.raises(ConfigError, match="has no split 'test'"):
        promote(trained.path, models, "shop", PromotionSpec(split="test"))
    with pytest.raises(DataNotFoundError):
        promote(trained.path, models, "shop", data=tmp_path / "gone")
    assert not models.exists()


def test_a_run_cannot_put_files_from_elsewhere_into_the_repository(trained: TrainedRun, tmp_path: Path) -> None:
    run = copied(trained.path, tmp_path / "run")
    (tmp_path / "secret").write_text("secret")
    for place in (run / "dataset" / "notes", run / "checkpoints" / "step-00000016" / "notes"):
        place.symlink_to(tmp_path / "secret")
        with pytest.raises(FormatError, check=at(place, "a link to")):
            promote(run, tmp_path / "models", "shop")
        place.unlink()
    assert not (tmp_path / "models").exists()


def test_a_damaged_run_is_not_promoted(trained: TrainedRun, tmp_path: Path) -> None:
    run = copied(trained.path, tmp_path / "run")
    promote(run, tmp_path / "models", "shop")
    dense = run / "checkpoints" / "step-00000016" / "dense.safetensors"
    content = bytearray(dense.read_bytes())
    content[-1] ^= 1
    # Under a new name: the version has a link to the former content.
    dense.unlink()
    dense.write_bytes(content)
    with pytest.raises(FormatError):
        promote(run, tmp_path / "models", "shop")
    model = ModelRepository(tmp_path / "models").known("shop")
    assert (model.versions, model.pointer().current) == ((1,), 1)
    assert sorted(path.name for path in model.path.iterdir()) == ["1", "pointer.json"]


def test_data_of_other_columns_are_not_compared(trained: TrainedRun, tmp_path: Path) -> None:
    other = copied(trained.data, tmp_path / "other")
    file = other / "dataset.json"
    file.write_text(file.read_text().replace('"C7"', '"C70"'))
    with pytest.raises(ConfigError):
        promote(trained.path, tmp_path / "models", "shop", data=other)


def test_a_run_whose_data_moved_needs_their_new_place(trained: TrainedRun, tmp_path: Path) -> None:
    run = copied(trained.path, tmp_path / "run")
    description = run / "run.json"
    description.write_text(description.read_text().replace(str(trained.data), str(tmp_path / "gone")))
    with pytest.raises(DataNotFoundError, match="another place of the run's data"):
        promote(run, tmp_path / "models", "shop")
    assert promote(run, tmp_path / "models", "shop", data=trained.data).version == 1


def test_a_full_disk_leaves_nothing(trained: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> bool:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr("terarec.apps.promotion.link_or_copy", full)
    with pytest.raises(NoSpaceError):
        promote(trained.path, tmp_path / "models", "shop")
    assert not (tmp_path / "models").exists()


def test_a_file_system_without_links_gets_copies(
    trained: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    report = promote(trained.path, tmp_path, "shop")
    assert report.linked_bytes == 0
    dense = "checkpoints/step-00000016/dense.safetensors"
    assert (report.path / dense).stat().st_nlink == 1
    assert (report.path / dense).read_bytes() == (trained.path / dense).read_bytes()


def test_a_checkpoint_that_a_training_removes_meanwhile_is_replaced_by_its_successor(
    chain: Path, trained: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(chain, tmp_path / "run")
    checkpoints, base = run / "checkpoints", tmp_path / "step-00000010"
    (checkpoints / base.name).rename(base)

    def link(source: Path, target: Path) -> bool:
        if source.parent.name == "step-00000004" and base.exists():
            base.rename(checkpoints / base.name)
            for step in (2, 4, 6, 8):
                shutil.rmtree(checkpoints / f"step-{step:08d}")
        return link_or_copy(source, target)

    monkeypatch.setattr("terarec.apps.promotion.link_or_copy", link)
    report = promote(run, tmp_path / "models", "shop")
    assert report.step == 10
    # Nothing of the first attempt is left.
    assert [path.name for path in (report.path / "checkpoints").iterdir()] == [base.name]
    expected = InferenceSession.open(chain, 10).predict(trained.records(0, 20))
    assert np.array_equal(InferenceSession.open(report.path).predict(trained.records(0, 20)), expected)


@pytest.mark.slow
def test_old_versions_are_removed_on_request(trained: TrainedRun, tmp_path: Path) -> None:
    for _ in range(3):
        promote(trained.path, tmp_path, "shop")
    assert promote(trained.path, tmp_path, "shop", PromotionSpec(keep=1)).removed == (1, 2)
    # 3 is what a rollback returns to.
    assert ModelRepository(tmp_path).known("shop").versions == (3, 4)


def test_two_promotions_at_once_do_not_mix(trained: TrainedRun, tmp_path: Path) -> None:
    ended: list[object] = []
    barrier = threading.Barrier(2)

    def run() -> None:
        barrier.wait()
        try:
            ended.append(promote(trained.path, tmp_path, "shop").version)
        except ConfigError as error:
            ended.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    versions = sorted(number for number in ended if isinstance(number, int))
    refused = [error for error in ended if isinstance(error, ConfigError)]
    assert versions in ([1], [1, 2])
    assert len(versions) + len(refused) == 2
    assert all("another promotion of this model runs" in error.problem for error in refused)
    model = ModelRepository(tmp_path).known("shop")
    assert (model.versions, model.pointer().current) == (tuple(versions), versions[-1])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["link_or_copy", "_write_golden", "write_version"])
def test_a_promotion_that_is_killed_leaves_nothing_half_published(
    trained: TrainedRun, tmp_path: Path, place: str
) -> None:
    promote(trained.path, tmp_path / "models", "shop")
    program = f"""
import os, signal
from pathlib import Path
from terarec.apps import promotion
def die(*_):
    Path({str(tmp_path / "reached")!r}).touch()
    os.kill(os.getpid(), signal.SIGKILL)
promotion.{place} = die
promotion.promote(Path({str(trained.path)!r}), Path({str(tmp_path / "models")!r}), "shop")
"""
    ended = Python(program).wait()
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    wait_for((tmp_path / "reached").exists)
    model = ModelRepository(tmp_path / "models").known("shop")
    assert (model.versions, model.pointer().current) == ((1,), 1)
    assert promote(trained.path, tmp_path / "models", "shop").version == 2
    assert sorted(path.name for path in model.path.iterdir()) == ["1", "2", "pointer.json"]
