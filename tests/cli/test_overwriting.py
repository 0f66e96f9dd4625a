# SPDX-License-Identifier: Apache-2.0
"""No command replaces an existing file without --force."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Workshop, figures, rejected
from tests.errors import at
from tests.params import in_every_run

pytestmark = pytest.mark.usefixtures("reports")

PRECIOUS = b"what somebody needs"


def commands(workshop: Workshop, out: Path) -> dict[str, tuple[list[Any], Path, list[Path]]]:
    """Command -> its arguments, what it writes, and the files of that."""
    small = ["--width", 4, "--bottom", "8-4", "--top", "8", "--set", "training.max_steps=2"]
    day = workshop.raw / "day_0.tsv"
    page = out / "page.html"
    return {
        "generate": (["generate", "adult", "--rows", 50], out / "log", []),
        "workflow": (["workflow", "criteo"], out / "criteo.json", [out / "criteo.json"]),
        "prepare criteo": (["prepare", "criteo", day], out / "data", []),
        "prepare": (["prepare", "criteo-terabyte", day, "--split", "train"], out / "data", []),
        "convert": (["convert", workshop.data, "--to", "norm"], out / "norm", []),
        "drift": (["drift", workshop.data, workshop.raw_format], page, [page, out / "page.json"]),
        "train": (["train", "--model", "dlrm", "--data", workshop.data, *small], out / "run", []),
        "export": (["export", workshop.run], out / "exported", []),
        "predict": (["predict", workshop.run, "--data", workshop.data], out / "s.parquet", [out / "s.parquet"]),
        "predict raw": (["predict", workshop.run, day], out / "s.csv", [out / "s.csv"]),
    }


NAMES = list(commands(Workshop(*[Path()] * 4, {}, {}, {}), Path()))  # type: ignore[arg-type]


# A page on the drift of 40 columns takes 5 s.
@pytest.mark.parametrize("name", in_every_run([name for name in NAMES if name != "drift"], NAMES))
def test_no_command_replaces_what_is_there(workshop: Workshop, tmp_path: Path, name: str) -> None:
    arguments, out, files = commands(workshop, tmp_path)[name]
    for precious in files or [out / "precious.txt"]:
        precious.parent.mkdir(exist_ok=True)
        precious.write_bytes(PRECIOUS)
        rejected(*arguments, "--out", out, where="--out", problem=str(precious if files else out))
        assert precious.read_bytes() == PRECIOUS
        assert [path.name for path in precious.parent.iterdir()] == [precious.name]
        if not files:
            return  # a directory that holds something is never replaced
        precious.unlink()
    for precious in files:
        precious.write_bytes(PRECIOUS)
    figures(*arguments, "--out", out, "--force")
    assert all(path.read_bytes() != PRECIOUS for path in files)
    assert sorted(tmp_path.iterdir()) == sorted(files)


@pytest.mark.parametrize("name", [name for name in NAMES if name in {"workflow", "drift", "predict", "predict raw"}])
def test_a_link_that_leads_nowhere_and_a_directory(workshop: Workshop, tmp_path: Path, name: str) -> None:
    arguments, out, _ = commands(workshop, tmp_path)[name]
    out.symlink_to(tmp_path / "elsewhere")
    rejected(*arguments, "--out", out, where="--out", problem=f"{out} exists")
    out.unlink()
    out.mkdir()
    rejected(*arguments, "--out", out, "--force", where="--out", problem=f"{out} is a directory")


def test_a_file_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    from terarec.errors import ConfigError
    from terarec.io.files import AtomicFile

    file = AtomicFile(tmp_path / "a.csv", replace=False)
    file.partial.write_bytes(b"new")
    file.path.write_bytes(PRECIOUS)
    with pytest.raises(ConfigError, check=at("out")):
        file.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    assert file.path.read_bytes() == PRECIOUS
