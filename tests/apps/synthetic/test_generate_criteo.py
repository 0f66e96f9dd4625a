# SPDX-License-Identifier: Apache-2.0
"""The log's bytes: layout, reproducibility, and the true AUC that comes with them."""

import hashlib
import json
import re

import numpy as np
import pytest

from terarec.apps.synthetic import criteo, generate
from terarec.apps.synthetic.raw_log import packed_auc
from terarec.errors import ConfigError, StorageError
from tests.errors import at

LINE = re.compile(r"[01](\t(-?\d+)?){13}(\t([0-9a-f]{8})?){26}")


def digests(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    out = tmp_path_factory.mktemp("log") / "raw"
    return out, generate(out, rows=20_000, days=3, seed=7)


def test_lines_have_the_layout(log):
    out, report = log
    lines = [line for name in report.files for line in (out / name).read_text().splitlines()]
    assert len(lines) == 20_000
    assert all(LINE.fullmatch(line) for line in lines)
    fields = [line.split("\t") for line in lines]
    assert sum(row[0] == "1" for row in fields) == report.positives
    assert min(int(row[2]) for row in fields if row[2]) == -3
    assert any(row[1] == "" for row in fields)
    assert any(row[16] == "" for row in fields)
    assert len({row[14 + 8] for row in fields}) == 3


def test_days_share_the_rows(log):
    out, report = log
    assert report.files == ("day_0.tsv", "day_1.tsv", "day_2.tsv")
    assert [(out / name).read_bytes().count(b"\n") for name in report.files] == [6_666, 6_667, 6_667]


def test_the_report_is_next_to_the_days(log):
    out, report = log
    known = json.loads((out / "generated.json").read_text())
    assert known["best_auc"] == report.best_auc
    assert (known["rows"], known["days"], known["seed"]) == (20_000, 3, 7)
    assert known["positives"] == report.positives
    assert known["text_bytes"] == sum((out / name).stat().st_size for name in report.files)


def test_about_a_quarter_is_positive_and_auc_is_as_planted(log):
    report = log[1]
    assert report.positives / report.rows == pytest.approx(0.25, abs=0.02)
    assert 0.80 < report.best_auc < 0.87


def test_same_seed_gives_the_same_bytes_for_any_blocks(log, tmp_path, monkeypatch):
    monkeypatch.setattr(criteo, "_BLOCK_ROWS", 1_001)
    generate(tmp_path / "again", rows=20_000, days=3, seed=7)
    assert digests(tmp_path / "again") == digests(log[0])


def test_days_only_cut_the_rows(log, tmp_path):
    report = generate(tmp_path / "one", rows=20_000, days=1, seed=7)
    text = b"".join((log[0] / name).read_bytes() for name in log[1].files)
    assert (tmp_path / "one" / "day_0.tsv").read_bytes() == text
    assert report.best_auc == log[1].best_auc


def test_another_seed_another_log(log, tmp_path):
    report = generate(tmp_path / "other", rows=20_000, days=3, seed=8)
    assert digests(tmp_path / "other")["day_0.tsv"] != digests(log[0])["day_0.tsv"]
    assert report.best_auc != log[1].best_auc


def test_labels_are_drawn_from_the_probabilities():
    """Among rows of a probability near p, the share of positives is p."""
    packed = criteo._Log.plan(200_000, seed=1).text(0, 200_000)[1]
    probabilities, labels = (packed >> 1).view(np.float32), packed & 1
    for low in np.arange(0.0, 0.9, 0.1):
        inside = (probabilities >= low) & (probabilities < low + 0.1)
        error = 4 * np.sqrt(0.25 / inside.sum())  # four standard errors
        assert labels[inside].mean() == pytest.approx(probabilities[inside].mean(), abs=error)
    assert packed_auc(packed.copy()) > packed_auc(((probabilities * 8).round() / 8).view(np.uint32) << 1 | labels)


def test_progress_ends_at_all_rows(tmp_path):
    seen = []
    generate(tmp_path / "log", rows=100, days=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(50, 100), (100, 100)]


@pytest.mark.parametrize(
    ("rows", "days", "seed", "place"),
    [(-1, 1, 0, ("rows", "got -1")), (0, 1, 0, ("rows", "got 0")), (5, 6, 0, ("generate",)), (5, 1, -1, ("seed",))],
)
def test_bad_numbers_are_rejected(tmp_path, rows, days, seed, place):
    with pytest.raises(ConfigError, check=at(*place)):
        generate(tmp_path / "log", rows=rows, days=days, seed=seed)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, check=at("out")):
        generate(tmp_path, rows=10, days=1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_empty_directory_is_taken(tmp_path):
    generate(tmp_path, rows=10, days=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day_0.tsv", "generated.json"]


def test_what_stops_it_leaves_nothing(tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "log", rows=100_000, days=2, progress=stop)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_rejects_is_reported_in_one_line(tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(StorageError, check=at(f"{tmp_path}/log")):
            generate(tmp_path / "log", rows=5_000, days=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
