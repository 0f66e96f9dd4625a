# SPDX-License-Identifier: Apache-2.0
"""Files of others: nested deeply, with bits flipped, cut short, or with names that lead elsewhere."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terarec.checkpoint import complete_checkpoints, load
from terarec.config import load_run
from terarec.errors import ConfigError, FormatError, TerarecError
from terarec.etl.source.source import read_best_auc
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset
from terarec.formats.container import read_tensors
from terarec.formats.dataset import read_parquet_metadata
from terarec.formats.hugectr.records import read_records
from terarec.formats.hugectr.weights import read_statistics
from terarec.formats.shard import open_shard
from terarec.hugectr.json_files import read_json
from terarec.io.directories import Journal
from terarec.serve import InferenceSession
from terarec.serve.json_codec import decode_infer_request
from terarec.spec.dataset import GENERATED_FILE
from terarec.train.metrics_log import read_log
from tests.cli.conftest import Workshop, rejected
from tests.errors import at
from tests.formats.damage import check_damage

NESTED = {
    f"{depth} {kind}": text * depth + (inner * depth if is_closed else "")
    for depth in (1_000, 100_000)
    for kind, text, inner, is_closed in (
        ("lists", "[", "]", True),
        ("objects", '{"a":', "}", False),
        ("lists cut short", "[", "", False),
    )
}


def container(path: Path) -> None:
    """Read the text of the file `path` as the header of a tensor container."""
    text = path.read_bytes()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    read_tensors(path)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "request": ("body", lambda path: decode_infer_request(path.read_bytes())),
    "run": ("run.json", load_run),
    "data set": ("dataset.json", lambda path: read_dataset(path.parent)),
    "workflow": ("workflow.json", lambda path: Workflow.load(path.parent)),
    "manifest": ("manifest.json", lambda path: load(path.parent)),
    "metrics": ("metrics.jsonl", read_log),
    "journal": ("journal.json", lambda path: Journal(path.parent, {})),
    "generated": (GENERATED_FILE, lambda path: read_best_auc([path.parent / "log"])),
    "container": ("x.safetensors", container),
    "HugeCTR's network": ("graph.json", lambda path: read_json(str(path))),
    "HugeCTR's metadata": ("_metadata.json", read_parquet_metadata),
    "HugeCTR's statistics": ("x.ntp.json", read_statistics),
    "records": ("records.json", read_records),
}


@pytest.mark.parametrize("case", NESTED)
@pytest.mark.parametrize("reader", READERS)
def test_s3_nesting_is_rejected_by_every_reader_of_json(tmp_path: Path, reader: str, case: str) -> None:
    name, read = READERS[reader]
    (tmp_path / name).write_text(NESTED[case])
    with pytest.raises(TerarecError) as caught:
        read(tmp_path / name)
    message = str(caught.value)
    assert isinstance(caught.value, ConfigError | FormatError)
    assert message.isprintable()
    assert len(message) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("command", ["train", "prepare", "evaluate", "serve", "inspect"])
def test_s3_nesting_is_one_line_of_a_command(workshop: Workshop, tmp_path: Path, command: str) -> None:
    broken = shutil.copytree(workshop.run, tmp_path / "run") / "run.json"
    broken.write_text("[" * 100_000)
    workflow = tmp_path / "workflow.json"
    workflow.write_text("[" * 100_000)
    arguments: dict[str, tuple[list[object], type]] = {
        "train": ([broken, "--data", workshop.data, "--out", tmp_path / "new"], ConfigError),
        "prepare": ([workflow, workshop.raw / "day_0.tsv", "--out", tmp_path / "new"], FormatError),
        "evaluate": ([broken.parent, "--data", workshop.data], ConfigError),
        "serve": ([broken.parent, "--port", 0], ConfigError),
        "inspect": ([broken.parent], ConfigError),
    }
    given, error = arguments[command]
    reported = rejected(command, *given, error=error, where=given[0] if error is FormatError else broken)
    assert len(reported["error"]) < 400
    assert not (tmp_path / "new").exists()


def read_run(run: Path, records: dict[str, list[Any]]) -> object:
    """All that is read of a run, and the scores that come of it."""
    load_run(run / "run.json")
    checkpoint = load(complete_checkpoints(run / "checkpoints")[-1])
    checkpoint.dense()
    checkpoint.optimizer()
    read_log(run / "metrics.jsonl")
    return InferenceSession.open(run).predict(records).tobytes()


def read_data(data: Path) -> object:
    """All rows of a data set."""
    spec, rows = read_dataset(data), []
    for split, shards in spec.splits.items():
        for shard in shards:
            opened = open_shard(spec, data / shard.file, shard.rows)
            for group in range(len(opened.group_rows)):
                block = opened.read_group(group)
                keys = [np.concatenate(column) if isinstance(column, tuple) else column for column in block.keys]
                rows += [split, block.label.tobytes(), block.dense.tobytes(), *(key.tobytes() for key in keys)]
    return spec.column_names, rows


def only_values_changed(original: bytes) -> Callable[[bytes], bool]:
    """Compare the fields of two JSON texts: its values have no checksum, since people may change them."""

    def fields(value: Any) -> Any:
        if isinstance(value, dict):
            return [fields(item) for item in value.values()]  # names of splits and columns are values, too
        return [fields(item) for item in value] if isinstance(value, list) else None

    return lambda changed: bool(fields(json.loads(changed)) == fields(json.loads(original)))


def records_of(workshop: Workshop) -> dict[str, list[Any]]:
    rows = [line.split("\t") for line in (workshop.raw / "day_1.tsv").read_text().splitlines()[:20]]
    numbers = {f"I{i}": [float(row[i]) if row[i] else None for row in rows] for i in range(1, 14)}
    return numbers | {f"C{i}": [row[13 + i] for row in rows] for i in range(1, 27)}


RUN_FILES = (
    "run.json",
    "metrics.jsonl",
    "dataset/dataset.json",
    "dataset/workflow/workflow.json",
    "dataset/workflow/states/*.json",
    "dataset/workflow/states/*-C1.parquet",
    "checkpoints/*/manifest.json",
    "checkpoints/*/state.json",
    "checkpoints/*/dense.safetensors",
    "checkpoints/*/optimizer.safetensors",
    "checkpoints/*/tables/C1-*.safetensors",
)


def damage_run(workshop: Workshop, tmp_path: Path, pattern: str, *, seed: int, count: int) -> None:
    run, records = shutil.copytree(workshop.run, tmp_path / "run"), records_of(workshop)
    for path in run.glob(pattern):
        is_text = path.suffix == ".json" and path.name not in ("manifest.json", "state.json")
        may_differ = only_values_changed(path.read_bytes()) if is_text else lambda _: False
        rejected = check_damage(path, lambda: read_run(run, records), seed=seed, count=count, may_differ=may_differ)
        assert rejected > 0


@pytest.mark.parametrize("pattern", RUN_FILES)
def test_s3_a_damaged_file_of_a_run_is_found_harmless_or_rejected(
    workshop: Workshop, tmp_path: Path, pattern: str
) -> None:
    damage_run(workshop, tmp_path, pattern, seed=1, count=8)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", RUN_FILES)
def test_s3_many_damaged_files_of_a_run(workshop: Workshop, tmp_path: Path, pattern: str) -> None:
    damage_run(workshop, tmp_path, pattern, seed=2, count=60)


DATA_FILES = (("data", "dataset.json"), ("data", "valid/*.parquet"), ("raw_format", "valid/*.bin"))


def damage_data(workshop: Workshop, tmp_path: Path, kind: str, pattern: str, *, seed: int, count: int) -> None:
    data = shutil.copytree(getattr(workshop, kind), tmp_path / "data")
    for path in data.glob(pattern):
        may_differ: Callable[[bytes], bool] = lambda _: False  # noqa: E731
        if path.suffix == ".json":
            may_differ = only_values_changed(path.read_bytes())
        elif path.suffix == ".bin":  # HugeCTR's Raw format has no checksum: its size is all that is known
            size = path.stat().st_size
            may_differ = lambda changed, size=size: len(changed) == size  # noqa: E731
        assert check_damage(path, lambda: read_data(data), seed=seed, count=count, may_differ=may_differ) > 0


@pytest.mark.parametrize(("kind", "pattern"), DATA_FILES)
def test_s3_a_damaged_file_of_a_data_set_is_found_harmless_or_rejected(
    workshop: Workshop, tmp_path: Path, kind: str, pattern: str
) -> None:
    damage_data(workshop, tmp_path, kind, pattern, seed=1, count=40)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "pattern"), DATA_FILES)
def test_s3_many_damaged_files_of_a_data_set(workshop: Workshop, tmp_path: Path, kind: str, pattern: str) -> None:
    damage_data(workshop, tmp_path, kind, pattern, seed=2, count=600)


ELSEWHERE = ("../secret", "tables/../../../secret", "tables/../../../secret-00000.safetensors", "/etc/hostname", "")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_s3_a_manifest_cannot_name_a_file_elsewhere(workshop: Workshop, tmp_path: Path, name: str) -> None:
    run = shutil.copytree(workshop.run, tmp_path / "run")
    (tmp_path / "run/secret").write_bytes(b"secret")
    checkpoint = complete_checkpoints(run / "checkpoints")[-1]
    content = json.loads((checkpoint / "manifest.json").read_text())
    content["files"].append({"file": name, "bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()})
    (checkpoint / "manifest.json").write_text(json.dumps(content))
    where = f"{checkpoint}/manifest.json: $.files[{len(content['files']) - 1}].file"
    with pytest.raises(FormatError, check=at(where, f"got '{name}'")):
        load(checkpoint)


def test_s3_a_checkpoint_cannot_link_to_a_file_elsewhere(workshop: Workshop, tmp_path: Path) -> None:
    run = shutil.copytree(workshop.run, tmp_path / "run")
    checkpoint = complete_checkpoints(run / "checkpoints")[-1]
    (checkpoint / "dense.safetensors").rename(tmp_path / "elsewhere")
    (checkpoint / "dense.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, check=at(f"{checkpoint}/dense.safetensors")):
        load(checkpoint)
    linked = tmp_path / "linked"
    linked.symlink_to(workshop.run)  # a run may lie behind a link as a whole
    assert load(complete_checkpoints(linked / "checkpoints")[-1]).dense()


@pytest.mark.parametrize("name", ["../day_0.tsv", "train/../../x", "/etc/hostname", ""])
@pytest.mark.parametrize("field", ["shard", "workflow"])
def test_s3_a_data_set_cannot_name_a_file_elsewhere(workshop: Workshop, tmp_path: Path, field: str, name: str) -> None:
    data = shutil.copytree(workshop.data, tmp_path / "data")
    content = json.loads((data / "dataset.json").read_text())
    if field == "shard":
        content["dataset"]["splits"]["train"][0]["file"] = name
        where = f"{data}/dataset.json: $.dataset.splits.train[0].file"
    else:
        content["dataset"]["workflow"] = name
        where = f"{data}/dataset.json: $.dataset.workflow"
    (data / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, check=at(where, f"got '{name}'")):
        read_dataset(data)


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc", "..", ""])
def test_s3_a_data_set_cannot_name_a_split_elsewhere(workshop: Workshop, tmp_path: Path, name: str) -> None:
    data = shutil.copytree(workshop.data, tmp_path / "data")
    content = json.loads((data / "dataset.json").read_text())
    content["dataset"]["splits"] = {name: []}
    (data / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, check=at(f"{data}/dataset.json: $.dataset.splits")):
        read_dataset(data)


def test_s3_only_regular_files_are_read(workshop: Workshop, tmp_path: Path) -> None:
    data = shutil.copytree(workshop.data, tmp_path / "data")
    shard = next((data / "train").glob("*.parquet"))
    shard.unlink()
    shard.symlink_to("/dev/zero")
    spec = read_dataset(data)
    with pytest.raises(FormatError):
        open_shard(spec, shard)
