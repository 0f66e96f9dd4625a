# SPDX-License-Identifier: Apache-2.0
"""``tools/upstream.py`` on files in the style of upstream's, which these tests write."""

import csv
import json
import subprocess
import sys
from pathlib import Path, PurePosixPath

import nbformat
import numpy as np
import pandas as pd
import pytest
from tools.upstream import release_of
from tools.upstream_files import probe
from tools.upstream_files.cases import SOK, Case, find_cases, in_chains, stop_of
from tools.upstream_files.changes import shrink
from tools.upstream_files.data import generate, place_named_files
from tools.upstream_files.pages import (
    _last_error,
    blocks,
    notebook_arguments,
    notebook_scripts,
    run_notebook,
    run_page,
)
from tools.upstream_files.probe import table_sizes
from tools.upstream_files.running import Folder, Options, Row, explain
from tools.upstream_files.setups import prepare, write_scored_model
from tools.upstream_files.table import lines, write_csv

from terarec import hugectr
from terarec.data.records import NormSource, RecordReader
from terarec.hugectr.inference import CreateInferenceSession, InferenceParams
from terarec.spec import RecordLayout, SparseInput
from tests.hugectr.training_files import training_file

TRAINING = """
import hugectr
from mpi4py import MPI

solver = hugectr.CreateSolver(max_eval_batches=300, batchsize_eval=16384, batchsize=16384, vvgpu=[[0]])
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Norm,
    source=["./some_data/file_list.txt"],
    eval_source="./some_data/file_list_test.txt",
    check_type=hugectr.Check_t.Sum,
)
model = hugectr.Model(solver, reader, hugectr.CreateOptimizer())
sparse = [hugectr.DataReaderSparseParam("data1", 2, False, 3)]
model.add(hugectr.Input(1, "label", 2, "dense", sparse))
model.add(hugectr.DenseLayer(hugectr.Layer_t.InnerProduct, bottom_names=["dense"], top_names=["fc"], num_output=1))
model.add(hugectr.DenseLayer(hugectr.Layer_t.BinaryCrossEntropyLoss, ["fc", "label"], ["loss"]))
model.compile()
model.fit(max_iter=2300, display=200, eval_interval=1000, snapshot=2000, snapshot_prefix="/dump_infer/one")
open("/dump_infer/one_dense_2000.model").close()
"""
FILES = {
    "test/pybind_test/changed.py": TRAINING,
    "test/pybind_test/threshold.py": TRAINING + 'raise RuntimeError("Cannot reach the AUC threshold {}".format(0.8))',
    "test/pybind_test/failing.py": "import hugectr\n\nhugectr.CreateSolver(batchsiz=3)\n",
    "test/pybind_test/unchanged.py": "import hugectr\nassert hugectr.CreateSolver().compat_release == '4.1'\n",
    "test/pybind_test/helper.py": "NAME = 1\n",
    "samples/for_gpus.py": "import cudf\nimport hugectr\n",
    "samples/wrong.md": "```python\nmodel.fit(max_iter=1)\nmodel.fit(max_iters=1)\n```\n",
    "docs/page.md": "# Page\n\n```python\nhugectr.CreateSolver()\n```\n\n```python\nhugectr.CreateSolver(lr=1)\n```\n",
}


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "v4.1.1"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
def test_each_file_gets_its_row_and_a_failure_the_exit_code(checkout, tmp_path):
    """Finding M: upstream's files are the test."""
    table = tmp_path / "table.csv"
    tool = Path(__file__).parents[2] / "tools" / "upstream.py"
    command = [sys.executable, tool, checkout, "--jobs", "2", "--folder", ".", "--csv", table]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    rows = {row["file"]: row for row in csv.DictReader(table.open(newline=""))}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "docs/page.md": "unchanged",
        "samples/for_gpus.py": "not run",
        "samples/wrong.md": "failed",
        "test/pybind_test/changed.py": "changed",
        "test/pybind_test/failing.py": "failed",
        "test/pybind_test/threshold.py": "changed",
        "test/pybind_test/unchanged.py": "unchanged",
    }
    threshold = "; line 20: an AUC below the 0.8 of upstream's own data and iterations"
    assert rows["test/pybind_test/threshold.py"]["detail"].endswith(threshold)
    assert "batch size 16384 -> 256" in rows["test/pybind_test/changed.py"]["detail"]
    assert rows["test/pybind_test/failing.py"]["detail"].startswith("line 3: ")
    assert rows["samples/wrong.md"]["detail"].startswith("line 3: ")
    assert "generated file_list.txt: norm" in done.stdout
    assert not list(tmp_path.glob("upstream-*"))


def test_the_cases_are_the_files_that_use_hugectr(checkout):
    cases = {case.path: case.reason for case in find_cases(checkout)}
    reasons = {"samples/for_gpus.py": "needs cuDF, which is for GPUs only"}
    assert cases == {name: reasons.get(name, "") for name in FILES if "helper" not in name}
    assert [case.path for case in find_cases(checkout, ("docs",))] == ["docs/page.md"]


OLDER = {
    "test/pybind_test/wdl_etc_mpi.py": "output_dir = sys.argv[2]\nhugectr.DataReaderType_t.Parquet",
    "test/pybind_test/set_source_raw_dlrm_1gpu.py": "",
    "test/pybind_test/wdl_mos_high_level.py": "use_host_ps = sys.argv[2].lower() == 'true'\noutput_dir = sys.argv[3]",
    "test/pybind_test/wdl_mos_scratch_high_level.py": "use_host_ps = sys.argv[2]\noutput_dir = sys.argv[3]",
}


def test_scripts_of_older_releases_get_the_arguments_that_they_name(tmp_path):
    """Finding M: those of 2.3 and 3.0, and training caches on several processes."""
    formats = {"wdl_fp16_1gpu": "Parquet", "wdl_1gpu": "Parquet", "wdl_etc": "Norm", "dlrm_set_source": "Raw"}
    for name, kind in formats.items():
        file = tmp_path / "test" / "scripts" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'{{"solver": {{}}, "layers": [{{"source": "", "format": "{kind}"}}]}}')
    for name, rest in OLDER.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"import sys\nimport hugectr\njson_file = sys.argv[1]\n{rest}\n")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "merged.ipynb").write_text('{"cells": [\n<<<<<<< HEAD\n')
    chains = in_chains(find_cases(tmp_path))
    found = {
        Path(case.path).name: (bool(case.reason), case.processes, *(Path(argument).name for argument in case.arguments))
        for chain in chains
        for case in chain
    }
    assert found == {
        "merged.ipynb": (True, 1),
        "wdl_etc_mpi.py": (False, 2, "wdl_1gpu.json", "etc_output"),
        "set_source_raw_dlrm_1gpu.py": (False, 1, "dlrm_set_source.json"),
        "wdl_mos_high_level.py": (False, 1, "wdl_1gpu.json", "true", "etc_output"),
        "wdl_mos_scratch_high_level.py": (False, 1, "wdl_1gpu.json", "true", "etc_output"),
        **{f"{name}.json": (False, 1) for name in formats},
    }
    (continued,) = [chain for chain in chains if len(chain) > 1]
    assert "scratch" in continued[0].path


def test_tests_of_the_plugin_for_tensorflow_run_on_one_process_and_on_two(tmp_path):
    names = (
        "op_test/a_test.py",
        *(f"function_test/{name}_test.py" for name in ("tf1/a", "tf2/lookup/a", "tf2/variable/b")),
    )
    for folder, package in zip(SOK[:2], ("sparse_operation_kit", "sparse_operation_kit.experiment"), strict=True):
        for name in names:
            file = tmp_path / folder / name
            file.parent.mkdir(parents=True)
            file.write_text(f"import horovod.tensorflow as hvd\nimport {package} as sok\n")
    cases = find_cases(tmp_path)
    for folder in SOK[:2]:
        found = [(case.title.removeprefix(folder), case.reason) for case in cases if case.path.startswith(folder)]
        assert found == [
            ("function_test/tf1/a_test.py", "needs TensorFlow 1"),
            ("function_test/tf2/lookup/a_test.py", ""),
            ("function_test/tf2/lookup/a_test.py (2 processes)", ""),
            ("function_test/tf2/variable/b_test.py", ""),
            ("op_test/a_test.py", "calls raw ops of SOK's, which terarec does not have"),
        ]


def test_a_notebook_runs_up_to_a_server_that_cannot_be_here(tmp_path):
    """Finding M14: half of upstream's notebook on Triton's server needs none."""
    file = tmp_path / "hps_tf" / "notebooks" / "hps_tensorflow_triton_deployment_demo.ipynb"
    file.parent.mkdir(parents=True)
    sources = ["import hierarchical_parameter_server as hps", "!curl localhost:8000/v2", "import tritonclient"]
    file.write_text(json.dumps({"cells": [{"cell_type": "code", "source": [source]} for source in sources]}))
    assert [case.reason for case in find_cases(tmp_path)] == [""]


def test_converters_run_after_the_scripts_that_train():
    names = ("hugectr2onnx_dcn_test.py", "train_scripts/deepfm.py", "train_scripts/dcn.py")
    cases = [Case(path=f"test/onnx_converter_test/{name}", chain="onnx dcn") for name in names]
    (chain,) = in_chains([*cases])
    assert [case.path for case in chain] == [cases[1].path, cases[2].path, cases[0].path]


@pytest.mark.parametrize(
    ("text", "shrunk"),
    [
        ("max_iter=2300, snapshot = 2000, eval_interval=1001", "max_iter=23, snapshot = 20, eval_interval=11"),
        ('"batchsize": 16384, "max_iter": 18000', '"batchsize": 256, "max_iter": 180'),
        ('load("/dump_infer/dcn_dense_2000.model")', 'load("/r/dump_infer/dcn_dense_20.model")'),
        ('"pred_" + str(2000)', '"pred_" + str(20)'),
        ("sizes = [203931,\n  4, 18598]", "sizes = [2000,\n  4, 2000]"),
        ("batchsize=71680, batchsize_eval=17548", "batchsize=2240, batchsize_eval=274"),
        ("batchsize_eval=6400, batchsize=64", "batchsize_eval=6400, batchsize=64"),
        ('"max_vocabulary_size_per_gpu": 2322444', '"max_vocabulary_size_per_gpu": 100000'),
        ("num_output=1024, embedding_vec_size=128, lr=0.001", "num_output=1024, embedding_vec_size=128, lr=0.001"),
        ('args["global_batch_size"] = 16384', 'args["global_batch_size"] = 256'),
        ("vocabulary_range = [[0, 9000], [9000, 9001]]", "vocabulary_range = [[0, 9000], [9000, 9001]]"),
        ('sys.path.append("/usr/local/hugectr/lib")', 'sys.path.append("/usr/local/hugectr/lib")'),
    ],
)
def test_counts_shrink_and_nothing_else(text, shrunk):
    found, changes = shrink(text, PurePosixPath("/r"))
    assert found == shrunk
    assert bool(changes.counts) == (found.replace("/r/", "/") != text)


DEMAND = {
    "kind": "norm",
    "sources": ["data/file_list.0.txt"],
    "keysets": ["data/file_list.0.keyset"],
    "eval_source": "data/file_list_test.txt",
    "label_dim": 1,
    "dense_dim": 2,
    "nnz": [2, 1],
    "is_fixed": True,
    "slot_sizes": [10, 20],
    "key_bytes": 4,
    "checksum": True,
    "is_float": False,
    "rows": 8,
    "eval_rows": 4,
}


def test_data_has_the_layout_that_is_asked_for_and_its_keysets(tmp_path):
    written = generate([DEMAND], tmp_path, 16)
    assert [one.source.name for one in written] == ["file_list.0.txt", "file_list_test.txt"]
    slots = SparseInput(name="data", nnz_per_slot=(2, 1), is_fixed_length=True)
    layout = RecordLayout(label_dim=1, dense_dim=2, inputs=(slots,), key_bytes=4)
    source = NormSource(written[0].source, layout, checksum=True)
    reader = RecordReader(source, batch_size=16, repeat=False, drop_last=False, threads=1)
    keys = next(iter(reader)).sparse.keys.numpy()
    reader.close()
    assert len(keys) == 48
    assert np.fromfile(tmp_path / "data/file_list.0.keyset", np.uint32).tolist() == np.unique(keys).tolist()
    assert generate([DEMAND], tmp_path, 16) == []
    assert place_named_files(["./data/val/own_name.data"], written, tmp_path)
    assert (tmp_path / "data/val/own_name.data").read_bytes() == written[1].files[0].read_bytes()


def test_keys_fit_the_smallest_table_of_a_collection_that_looks_them_up():
    tables = [hugectr.EmbeddingTableConfig(name=str(size), max_vocabulary_size=size, ev_size=8) for size in (9, 4, -1)]
    collection = hugectr.EmbeddingCollectionConfig()
    for number, (table, slot) in enumerate(zip(tables, ("a", "a", "b"), strict=True)):
        collection.embedding_lookup(table, slot, f"out{number}", "sum")
    slots = [hugectr.DataReaderSparseParam("a", [1, 1], True, 2), hugectr.DataReaderSparseParam("b", 1, True, 1)]
    assert table_sizes([collection], slots) == [4, 4, 1_000]
    assert table_sizes([], slots) == []


def test_pages_run_block_by_block(tmp_path, capsys):
    text = "# A\n\n```python\nknown.missing()\n```\n\n```python\nx = known\n```\ntext\n```python\n1 / 0\n```\n"
    assert [line for line, _ in blocks(text)] == [4, 8, 12]
    (tmp_path / "page.md").write_text(text)
    (tmp_path / "prelude.py").write_text("class known:\n    pass\n")
    assert run_page(tmp_path / "page.md", tmp_path / "prelude.py") == 2
    assert "failed in line 12" in capsys.readouterr().err


def test_only_what_a_page_itself_leaves_out_is_incomplete(tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "def broken():\n    return unknown\n\n\ndef lost(path):\n    raise FileNotFoundError(path)\n"
    )
    calls = ("absent", "own.broken()", 'own.lost("given.json")', "own.lost('own' + '.lock')")
    text = "".join(f"```python\n{call}\n```\n" for call in calls)
    (tmp_path / "page.md").write_text(text)
    (tmp_path / "prelude.py").write_text(
        f"import runpy, types\nown = types.SimpleNamespace(**runpy.run_path({str(tmp_path / 'own.py')!r}))\n"
    )
    assert run_page(tmp_path / "page.md", tmp_path / "prelude.py") == 2
    shown = capsys.readouterr()
    assert [line.split(":")[0] for line in shown.out.splitlines()] == ["block at line 2", "block at line 8"]
    assert "failed in line 5" in shown.err
    assert "failed in line 11" in shown.err


def test_the_probe_reads_training_files(tmp_path):
    """Finding M: scripts of 2.3 and 3.0 have their data in them."""
    file = training_file(tmp_path / "one.json", "./a.txt", "./b.txt")
    session = probe._Session(hugectr.SolverParser(file), file)
    assert session.train() is False
    demand = probe.DEMANDS.pop()
    assert (demand.kind, demand.sources, demand.eval_source) == ("norm", ["./a.txt"], "./b.txt")


WAITING = "import multiprocessing, time\nmultiprocessing.Process(target=print).start()\nwhile True: time.sleep(9)"
CONVERTING = "import hugectr, hugectr2onnx\nhugectr2onnx.converter.convert('a.onnx', 'a.json', 'a.model')\nprint('end')"


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        (CONVERTING, "end\n"),
        (WAITING, "the probe ended with SystemExit: it waits for a process that was not started\n"),
    ],
)
def test_the_probe_neither_converts_nor_waits_for_processes(tmp_path, script, printed):
    """Finding M: one script converts for minutes what others have trained, one waits for the processes it starts."""
    (tmp_path / "a.py").write_text(script)
    folder = Folder(tmp_path, Options(checkout=tmp_path, release="4.1", timeout=300.0))
    words = ["-m", "tools.upstream_files.probe", str(tmp_path / "demands.json"), str(tmp_path / "a.py")]
    assert folder.call(words) == (0, printed)


def test_whatever_a_file_needs_has_its_time_limit(tmp_path):
    """Finding M: on a busy machine 300 s were not enough, whatever limit the user had set."""
    folder = Folder(tmp_path, Options(checkout=tmp_path, release="4.1", timeout=0.5))
    assert folder.call(["-c", "import time; time.sleep(600)"]) == (-1, "")


def test_a_model_is_made_that_has_the_scores_of_an_unpublished_one(tmp_path):
    """Finding M: two of upstream's tests compare with numbers of a model of its own."""
    script = tmp_path / "movielens_nodense_test.py"
    script.write_text("emb_size = [30, 40]\nresult = [0.25, 0.5, 0.875]\n")
    write_scored_model(script, tmp_path / "scored")
    samples = pd.read_parquet(tmp_path / "scored" / "samples")
    keys = (samples[["userId", "movieId"]] + np.array([0, 30])).to_numpy().flatten().tolist()
    params = InferenceParams(
        model_name="scored",
        max_batchsize=64,
        hit_rate_threshold=1.0,
        dense_model_file=str(tmp_path / "scored" / "dense.model"),
        sparse_model_files=[str(tmp_path / "scored" / "table0.model")],
        device_id=0,
        use_gpu_embedding_cache=False,
        cache_size_percentage=0.9,
        i64_input_key=True,
    )
    session = CreateInferenceSession(str(tmp_path / "scored" / "graph.json"), params)
    np.testing.assert_allclose(session.predict([], keys, list(range(7))), [0.25, 0.5, 0.875], rtol=1e-6)


def test_what_cannot_be_prepared_is_no_failure_of_the_script(tmp_path):
    script = tmp_path / "test" / "pybind_test" / "wdl_multitable_test.py"
    script.parent.mkdir(parents=True)
    script.write_text("import hugectr\n")
    options = Options(checkout=tmp_path, release="4.1", timeout=60.0)
    (tmp_path / "base").mkdir()
    with pytest.raises(RuntimeError, match=r"no model for wdl_multitable_test\.py"):
        prepare(Case(path="test/pybind_test/wdl_multitable_test.py"), Folder(tmp_path / "base", options))


def test_notebooks_hold_cells_and_the_scripts_that_they_write():
    sources = ["%%writefile 'train.py'\nimport hugectr\n", "!python3 train.py a.json\nx = 1", "%%bash\nls"]
    cells = [{"cell_type": "code", "source": [source]} for source in sources]
    text = json.dumps({"cells": cells})
    assert notebook_scripts(text) == [("", "\nx = 1"), ("train.py", "import hugectr\n")]
    assert notebook_arguments(text, "train.py") == ["a.json"]


def test_notebooks_end_before_what_is_downloaded_and_what_would_end_programs_of_others():
    """Finding M: a cell of upstream's would end every Redis server of the machine."""
    path, killing = "copy/notebooks/hps_demo.ipynb", "ends programs of the whole machine by their name"
    assert stop_of(path, ["x = 1", "!wget https://github.com/redis/a", "!pkill redis-server"]) == (
        1,
        "downloads Redis and builds it",
    )
    assert stop_of("copy/notebooks/other.ipynb", ["x = 1", "!pkill redis-server"]) == (1, killing)
    assert stop_of(path, ["x = 1"]) is None


def test_an_error_of_a_notebook_is_the_line_with_its_message():
    head = "AssertionError" + " " * 28 + "Traceback (most recent call last)"
    assert _last_error(f"1\n{head}\nCell In[3], line 1\nAssertionError: no GPU\n") == "AssertionError: no GPU"
    assert _last_error("1\nValueError") == "ValueError"
    assert _last_error("1\n") == ""


@pytest.mark.slow
@pytest.mark.parametrize(("last", "code", "shown"), [("y", 0, "left out cells 1, 2: needs a GPU\n"), ("1 / 0", 1, "")])
def test_a_notebook_goes_on_after_cells_that_need_a_gpu(tmp_path, capfd, monkeypatch, last, code, shown):
    """Finding M: what upstream's notebook does after them, on several processes, was not run."""
    monkeypatch.chdir(tmp_path)
    asks = "y = 1\nraise AssertionError('Torch not compiled with CUDA enabled')\nx = 1"
    cells = [nbformat.v4.new_code_cell(source) for source in ("print(5)", asks, "print(x)", "print(y + 6)", last)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    assert run_notebook(tmp_path / "a.ipynb") == code
    printed = capfd.readouterr()
    assert printed.out.startswith("5\n")
    assert "7\n" in printed.out
    assert printed.out.endswith(shown)
    assert ("cell 4 failed: ZeroDivisionError" in printed.err) == bool(code)


OURS = f'  File "{Path(hugectr.__file__).parent}/model.py", line 1, in fit\n'
FRAME = (
    f"nvidia-smi: not found\nTraceback (most recent call last):\n{OURS}"  # which runs the file
    '  File "{}/copy/test/a.py", line 7, in <module>\n'
)


@pytest.mark.parametrize(
    ("error", "outcome", "place"),
    [
        ("ValueError: wrong", "failed", "line 7: ValueError: wrong"),
        ("ModuleNotFoundError: No module named 'tensorflow'", "not run", "from line 7 on: needs TensorFlow"),
        ("ModuleNotFoundError: No module named 'cudf'", "not run", "from line 7 on: needs cuDF"),
        ("RuntimeError: Found no NVIDIA driver on your system.", "not run", "from line 7 on: needs a GPU"),
        (f"{OURS}RuntimeError: Found no NVIDIA driver on your system.", "failed", "line 7: RuntimeError: Found no"),
        (f"{OURS}ModuleNotFoundError: No module named 'cudf'", "failed", "line 7: ModuleNotFoundError"),
        (f"{OURS}ModuleNotFoundError: No module named 'tensorflow'", "not run", "from line 7 on: needs TensorFlow"),
    ],
)
def test_errors_say_whose_they_are(error, outcome, place, tmp_path):
    options = Options(checkout=tmp_path, release="4.1", timeout=1.0)
    base = tmp_path / "base"
    base.mkdir()
    found = explain(1, f"{FRAME.format(base)}{error}\n", Folder(base, options), options)
    assert found[0] == outcome
    assert found[1].startswith(place)


def test_the_table_keeps_rows_of_other_files_and_sums_by_group(tmp_path):
    cases = [Case(path="samples/a.py"), Case(path="docs/b.md")]
    for outcome in ("failed", "unchanged"):
        write_csv([Row(case, outcome) for case in cases], tmp_path / "t.csv", "v1")
        cases = cases[:1]
    rows = [(row["file"], row["outcome"]) for row in csv.DictReader((tmp_path / "t.csv").open(newline=""))]
    assert rows == [("docs/b.md", "failed"), ("samples/a.py", "unchanged")]
    assert list(lines([Row(cases[0], "changed")]))[-1] == "samples: 1 changed"


def test_the_release_is_that_of_the_checkout(tmp_path):
    assert release_of(tmp_path / "v24.04.00") == "24.04"
    (tmp_path / "release_notes.md").write_text("## What's New in Version 4.3\n## What's New in Version 4.2\n")
    assert release_of(tmp_path) == "4.3"
