# SPDX-License-Identifier: Apache-2.0
"""URLs that stand in files are opened only where the caller allows it."""

from pathlib import Path

import pytest

from terarec.data.records.sources import open_split
from terarec.errors import ConfigError
from terarec.formats.hugectr import read_file_list
from terarec.formats.urls import allow_urls, check_url
from terarec.spec import RecordLayout, RecordsSpec, SparseInput
from terarec.spec.dataset import RecordSplit
from tests.errors import at

FOREIGN = "http://169.254.169.254/latest/meta-data"


def test_a_url_in_a_list_of_files_is_not_opened(tmp_path: Path) -> None:
    """Finding Q13."""
    (tmp_path / "list").write_text(f"2\n{tmp_path}/a\n{FOREIGN}\n")
    with pytest.raises(ConfigError, check=at(tmp_path / "list", FOREIGN)):
        read_file_list(tmp_path / "list")


def test_a_url_in_records_json_is_not_opened(tmp_path: Path) -> None:
    """Finding Q13."""
    inputs = (SparseInput(name="a", nnz_per_slot=(1,), is_fixed_length=True),)
    spec = RecordsSpec(
        kind="norm",
        layout=RecordLayout(label_dim=1, dense_dim=0, inputs=inputs),
        splits={"train": RecordSplit(path=FOREIGN, rows=1)},
        label_names=("label",),
        dense_names=(),
    )
    with pytest.raises(ConfigError, check=at(tmp_path / "records.json", "TERAREC_ALLOW_URLS=http://169.254.169.254")):
        open_split(spec, "train", tmp_path)


@pytest.mark.parametrize(
    ("url", "named_by"),
    [
        ("a/b", "list"),
        ("file:///a/b", "list"),
        ("s3://data/a", "s3://lists/list"),
        ("https://host/a", "https://host/list"),
        ("https://allowed/data/a", "list"),
        ("gs://by-variable/a", "list"),
    ],
)
def test_allowed(url: str, named_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAREC_ALLOW_URLS", "ftp://x, gs://by-variable")
    allow_urls("https://allowed/data/")
    assert check_url(url, named_by) == url


@pytest.mark.parametrize(
    ("url", "named_by"),
    [
        ("s3://data/a", "list"),
        ("https://host/a", "https://other/list"),
        ("https://host.evil/a", "https://host/list"),
        ("http://allowed-not/a", "list"),
        ("simplecache::file:///a", "list"),
        ("simplecache::http://host/a", "http://host/list"),
        ("gs://by-variable-of-others/a", "list"),
    ],
)
def test_not_allowed(url: str, named_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAREC_ALLOW_URLS", "gs://by-variable")
    allow_urls("http://allowed")
    with pytest.raises(ConfigError):
        check_url(url, named_by)
