# SPDX-License-Identifier: Apache-2.0
"""Model repositories: the pointer, its promotions and returns, version policies, and what may be removed."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.io.locks import file_lock
from terarec.io.removal import MARKER, remove_tree
from terarec.serve.repository import ModelRepository, RepositoryModel
from terarec.spec import to_data
from terarec.spec.serving_repository import (
    AllVersions,
    LatestVersions,
    PromotedVersions,
    PromotionSpec,
    RepositoryModelSpec,
    RepositorySpec,
    SpecificVersions,
    SplitSpec,
    VersionPolicy,
)
from tests.errors import at

ALL = PromotionSpec()


def model_with(path: Path, *versions: int) -> RepositoryModel:
    """A model with versions that hold what identifies one, and no weights."""
    for version in versions:
        (path / "shop" / str(version) / "dataset").mkdir(parents=True)
        (path / "shop" / str(version) / "run.json").write_text("{}")
        (path / "shop" / str(version) / "version.json").write_text("{}")
    return ModelRepository(path).model("shop")


def test_a_repository_lists_directories_with_versions_alone(tmp_path: Path) -> None:
    model_with(tmp_path, 1, 12, 3)
    (tmp_path / "notes").mkdir()
    (tmp_path / "shop" / "4.partial-1").mkdir()
    (tmp_path / "shop" / "007").mkdir()
    (tmp_path / "shop" / "5").mkdir()  # holds no run
    repository = ModelRepository(tmp_path)
    assert repository.names == ("shop",)
    assert repository.known("shop").versions == (1, 3, 12)
    with pytest.raises(ConfigError, check=at("model", "did you mean 'shop'?")):
        repository.known("shop2")
    with pytest.raises(DataNotFoundError, check=at(tmp_path / "none")):
        _ = ModelRepository(tmp_path / "none").names


@pytest.mark.parametrize("name", ["..", "a/b", "", ".hidden", "a\\b", "a\n"])
def test_no_name_leads_out_of_the_repository(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, check=at("model")):
        ModelRepository(tmp_path).model(name)


def test_no_version_is_a_link_that_leads_out_of_the_repository(tmp_path: Path) -> None:
    model_with(tmp_path / "other", 1)
    model = model_with(tmp_path / "mine", 1)
    (model.path / "2").symlink_to(tmp_path / "other" / "shop" / "1")
    assert model.version_path(1) == model.path / "1"
    with pytest.raises(FormatError, check=at(model.path / "2", "a link to")):
        model.version_path(2)


@pytest.mark.parametrize("target", ["2", "x" * 300], ids=["circle", "too-long"])
def test_a_version_that_cannot_be_read_hides_no_other_one(tmp_path: Path, target: str) -> None:
    model = model_with(tmp_path, 1, 3)
    (model.path / "2").symlink_to(target)
    assert model.versions == (1, 2, 3)
    with pytest.raises(OSError):
        model.described(2)
    for version in (1, 3):
        model.promote(version, ALL)
    assert model.roll_back().current == 1
    with model.promoting() as version:
        assert version == 4
    assert model.remove_old(1) == ()
    assert model.versions == (1, 2, 3)


def test_a_rollback_returns_step_by_step(tmp_path: Path) -> None:
    model = model_with(tmp_path, 1, 2, 3)
    for version in (1, 2, 3):
        assert model.promote(version, ALL).current == version
    assert model.roll_back().current == 2
    assert model.roll_back().current == 1
    with pytest.raises(ConfigError, check=at("version", "no earlier version")):
        model.roll_back()
    assert model.promote(3, ALL).before == (1,)
    events = [(event.action, event.version) for event in model.pointer().history]
    assert events == [("promote", 1), ("promote", 2), ("promote", 3), ("rollback", 2), ("rollback", 1), ("promote", 3)]


def test_a_rollback_to_a_version_takes_back_all_after_it(tmp_path: Path) -> None:
    model = model_with(tmp_path, 1, 2, 3, 4)
    for version in (1, 2, 3):
        model.promote(version, ALL)
    assert model.roll_back(1).before == ()
    # One that never answered comes on top.
    assert model.roll_back(4).before == (1,)
    assert model.roll_back(4).before == (1,)
    assert model.roll_back().current == 1
    with pytest.raises(ConfigError, check=at("version", "has no version 9, expected one of 1, 2, 3, 4")):
        model.roll_back(9)


def test_a_rollback_passes_over_versions_that_are_gone(tmp_path: Path) -> None:
    model = model_with(tmp_path, 1, 2, 3)
    for version in (1, 2, 3):
        model.promote(version, ALL)
    (model.path / "2" / "run.json").unlink()
    assert model.roll_back().current == 1


def test_a_promotion_of_a_version_that_answered_before_keeps_each_once(tmp_path: Path) -> None:
    model = model_with(tmp_path, 1, 2)
    for version in (1, 2, 1, 2, 2):
        model.promote(version, ALL)
    assert (model.pointer().current, model.pointer().before) == (2, (1,))


def test_a_second_version_answers_a_share_until_it_takes_over_or_ends(tmp_path: Path) -> None:
    model = model_with(tmp_path, 1, 2)
    split = PromotionSpec(share=0.1, by="user")
    with pytest.raises(ConfigError, match="no version answers yet"):
        model.promote(1, split)
    model.promote(1, ALL)
    with pytest.raises(ConfigError, match="version 1 answers already"):
        model.promote(1, split)
    pointer = model.promote(2, split)
    assert (pointer.current, pointer.split) == (1, SplitSpec(version=2, share=0.1, by="user"))
    assert pointer.versions == (1, 2)
    ended = model.roll_back()
    assert (ended.current, ended.split, ended.history[-1].action) == (1, None, "end")
    model.promote(2, PromotionSpec(shadow=1.0))
    over = model.promote(2, ALL)
    assert (over.current, over.before, over.shadow) == (2, (1,), None)


@pytest.mark.parametrize(
    ("policy", "without", "with_pointer"),
    [
        (PromotedVersions(), (4,), (2, 1)),
        (LatestVersions(count=2), (4, 3), (2, 1, 4, 3)),
        (AllVersions(), (4, 3, 2, 1), (2, 1, 4, 3)),
        (SpecificVersions(versions=(1, 3)), (3, 1), (2, 1, 3)),
    ],
)
def test_a_policy_says_which_versions_are_loaded(
    tmp_path: Path, policy: VersionPolicy, without: tuple[int, ...], with_pointer: tuple[int, ...]
) -> None:
    model = model_with(tmp_path, 1, 2, 3, 4)
    head = {"format": "terarec.repository_model", "version": 1}
    (model.path / "model.json").write_text(json.dumps(head | to_data(RepositoryModelSpec(versions=policy))))
    assert model.wanted(model.pointer()) == without
    model.promote(2, ALL)
    model.promote(1, PromotionSpec(shadow=0.5))
    assert model.wanted(model.pointer()) == with_pointer


def test_a_damaged_description_names_the_file_and_the_field(tmp_path: Path) -> None:
    model = model_with(tmp_path, 1)
    pointer = model.path / "pointer.json"
    pointer.write_text('{"format": "terarec.pointer", "version": 1, "current": 0}')
    with pytest.raises(FormatError, check=at(f"{pointer}: $.current", "got 0, expected an integer >= 1")):
        model.pointer()
    (model.path / "model.json").write_text('{"format": "terarec.repository_model", "version": 1, "versions": "all"}')
    with pytest.raises(FormatError, check=at(f"{model.path / 'model.json'}: $.versions")):
        model.spec()


def test_old_versions_go_and_what_answers_or_is_not_ours_stays(tmp_path: Path) -> None:
    model = model_with(tmp_path, 1, 2, 3, 4, 5, 6)
    (model.path / "2" / "version.json").unlink()  # put there by hand
    (model.path / "3" / "notes.txt").write_text("mine")
    for version in (1, 4, 5):
        model.promote(version, ALL)
    model.roll_back(4)
    assert model.remove_old(1) == (5,)
    # 4 answers, a rollback returns to 1, 6 is the highest.
    assert model.versions == (1, 2, 3, 4, 6)
    assert (model.path / "3" / "notes.txt").read_text() == "mine"


def test_a_version_that_somebody_names_while_others_are_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_with(tmp_path, 1, 2, 3, 4)
    for version in (1, 2, 3, 4):
        model.promote(version, ALL)

    def remove(path: Path, **options: Any) -> None:
        if path.name == "1":
            model.roll_back(2)
        remove_tree(path, **options)

    monkeypatch.setattr("terarec.serve.repository.remove_tree", remove)
    assert model.remove_old(1) == (1, 3)
    assert (model.pointer().current, model.versions) == (2, (2, 4))


def test_a_version_that_is_being_removed_cannot_be_promoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with(tmp_path, 1, 2)
    model.promote(2, ALL)
    # The directory is looked at again once nobody else changes the pointer.
    monkeypatch.setattr(RepositoryModel, "_inside", lambda model, path: (model.remove_old(1), path)[1])
    with pytest.raises(ConfigError, check=at("version", "has no version 1, expected one of 2")):
        model.promote(1, ALL)
    assert model.pointer().current == 2


def test_old_versions_stay_while_others_change_the_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A promotion failed by them although its version answered."""
    monkeypatch.setattr("terarec.serve.repository._LOCK_SECONDS", 0.0)
    model = model_with(tmp_path, 1, 2, 3)
    with file_lock(model.path / ".pointer.lock"):
        assert model.remove_old(1) == ()
    assert model.remove_old(1) == (1, 2)


def test_earlier_versions_that_are_gone_leave_the_pointer(tmp_path: Path) -> None:
    model = model_with(tmp_path, 1, 2, 3, 4)
    for version in (1, 2, 3):
        model.promote(version, ALL)
    (model.path / "1" / "run.json").unlink()
    assert model.promote(4, ALL).before == (2, 3)


def test_a_promotion_removes_what_a_killed_one_left_and_keeps_others_away(tmp_path: Path) -> None:
    model = model_with(tmp_path, 1, 2)
    for name, file in {"3.partial-77-0123abcd": "run.json", "4.partial-78-0123abcd": "photo.jpg"}.items():
        (model.path / name / "files" / "3").mkdir(parents=True)
        (model.path / name / "owner.lock").touch()
        (model.path / name / "files" / "3" / file).write_text("{}")
    (model.path / "3.partial-77-0123abcd" / "files" / MARKER).touch()
    with model.promoting() as version:
        assert version == 3
        with pytest.raises(ConfigError, check=at(model.path, "another promotion")):
            model.promoting().__enter__()
    assert not (model.path / "3.partial-77-0123abcd").exists()
    assert (model.path / "4.partial-78-0123abcd" / "files" / "3" / "photo.jpg").exists()
    assert not list(model.path.glob(".*"))


def test_a_number_means_the_same_weights_for_ever(tmp_path: Path) -> None:
    model = model_with(tmp_path, 1, 2, 3)
    model.promote(3, ALL)
    model.promote(1, ALL)
    (model.path / "3" / "run.json").unlink()
    (model.path / "3").rename(tmp_path / "elsewhere")
    with model.promoting() as version:
        assert version == 4


def test_numbers_of_versions_end(tmp_path: Path) -> None:
    """A minute of a day is one; the highest of ten digits is the last."""
    model = model_with(tmp_path, 2611290730)
    model.promote(2611290730, PromotionSpec())
    assert model.pointer().current == 2611290730
    model_with(tmp_path, 9_999_999_999)
    with pytest.raises(ConfigError, check=at(model.path, "version 9999999999 is taken")), model.promoting():
        pass


def test_a_model_that_could_not_be_promoted_leaves_nothing(tmp_path: Path) -> None:
    model = ModelRepository(tmp_path / "new").model("shop")
    with pytest.raises(RuntimeError), model.promoting():
        raise RuntimeError
    assert not (tmp_path / "new").exists()


def test_changes_of_a_pointer_at_the_same_time_all_count(tmp_path: Path) -> None:
    model = model_with(tmp_path, *range(1, 9))
    threads = [threading.Thread(target=model.promote, args=(version, ALL)) for version in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pointer = model.pointer()
    assert sorted(event.version for event in pointer.history) == list(range(1, 9))
    assert sorted((pointer.current or 0, *pointer.before)) == list(range(1, 9))


def test_a_rollback_does_not_wait_for_a_promotion(tmp_path: Path) -> None:
    model = model_with(tmp_path, 1, 2)
    model.promote(1, ALL)
    model.promote(2, ALL)
    with file_lock(model.path / ".promoting.lock") as is_held:
        assert is_held
        assert model.roll_back().current == 1


def test_times_and_events_name_nobody(tmp_path: Path) -> None:
    model = model_with(tmp_path, 1)
    model.promote(1, ALL)
    text = (model.path / "pointer.json").read_text()
    assert os.environ.get("USER", "root") not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"control": "auto"}, "control"),
        ({"poll_seconds": 0.0}, "poll_seconds"),
        ({"keep_versions": -1}, "keep_versions"),
        ({"load": ("a",)}, "load"),
        ({"control": "explicit", "load": ("a", "a")}, "load"),
    ],
)
def test_a_spec_of_a_repository_is_checked(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, check=at(f"RepositorySpec.{field}")):
        RepositorySpec(path="models", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"share": 0.1}, "by"),
        ({"by": "user"}, "share"),
        ({"share": 1.0, "by": "user"}, "share"),
        ({"share": 0.1, "by": ""}, "by"),
        ({"shadow": 0.0}, "shadow"),
        ({"shadow": 0.1, "share": 0.1, "by": "user"}, "shadow"),
        ({"keep": 0}, "keep"),
        ({"split": ""}, "split"),
    ],
)
def test_a_spec_of_a_promotion_is_checked(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, check=at(f"PromotionSpec.{field}")):
        PromotionSpec(**changes)  # type: ignore[arg-type]
