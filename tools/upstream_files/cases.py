# SPDX-License-Identifier: Apache-2.0
"""Upstream's files: which to run, with which arguments, next to which others, and which not."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NOT_HERE = {
    "cudf": "needs cuDF, which is for GPUs only",
    "cupy": "needs CuPy, which is for GPUs only",
    "dask_cuda": "needs Dask-CUDA, which is for GPUs only",
    "dask_cudf": "needs Dask-cuDF, which is for GPUs only",
    "rmm": "needs RMM, which is for GPUs only",
    "nvtabular": "needs NVTabular with a GPU",
    "merlin": "needs NVTabular with a GPU",
    "nemo": "needs NeMo",
    "tensorrt": "needs TensorRT",
    "tritonclient": "needs Triton's server with a GPU",
    "tritonhttpclient": "needs Triton's server with a GPU",
    "papermill": "runs a notebook of this list",
    "testbook": "runs a notebook of this list",
}
"""Package that a file needs -> why it cannot run on a CPU."""

INSTALLABLE = {
    "tensorflow": "needs TensorFlow: pip install 'terarec[tensorflow]'",
    "tf_keras": "needs tf_keras",
    "pytz": "needs pytz",
}
"""Package that a file needs, and that an environment of terarec need not have -> the reason where it does not."""

_PLUGIN = "sparse_operation_kit/sparse_operation_kit/"
SOK = (
    f"{_PLUGIN}test/",
    f"{_PLUGIN}experiment/test/",
    f"{_PLUGIN}experiment/examples/",
    "sparse_operation_kit/example/",
    "sparse_operation_kit/unit_test/",
)
"""Upstream's tests and examples of the plugin for TensorFlow, of all releases."""

HPS_TF = ("hps_tf/", "docs/source/hierarchical_parameter_server/hps_dlrm_benchmark_scripts/create_tf_models.py")
"""Upstream's tests and examples of the layers for TensorFlow, which make their data themselves."""

LEGACY_KERAS = (
    "*/tf2/variable/hkv_test.py",
    "*/tf2/lookup/all2all_dense_embedding_test.py",
    "*/tf2/lookup/lookup_sparse_localized_test.py",
    "*/tf2/lookup_sp_weight/lookup_sparse_distributed_test.py",
    "*/tf2/lookup_sp_weight/lookup_sparse_localized_test.py",
    "*/experiment/*/lookup_sparse_distributed_test.py",
    "*/experiment/*/lookup_sparse_localized_dynamic_test.py",
    "hps_tf/notebooks/*",
    "hps_tf/test/integration/*",
    HPS_TF[1],
)
"""Patterns of files that Keras 3 refuses: they train two variables by one optimizer in turns, or call TensorFlow with
symbolic tensors and save a model as a folder."""

NOT_RUN = (
    ("test/pybind_test/data_source_test.py", "needs a Hadoop cluster"),
    ("tools/data_source/test_data_source.py", "needs a Hadoop cluster"),
    ("notebooks/*remote_filesystem.ipynb", "needs a Hadoop cluster"),
    ("notebooks/movie-lens-example.ipynb", "downloads a data set"),
    ("test/sok_perf_test/*", "measures the time of GPUs"),
    ("sparse_operation_kit/*/tf1/*", "needs TensorFlow 1"),
    ("sparse_operation_kit/*/op_test/*", "calls raw ops of SOK's, which terarec does not have"),
    ("sparse_operation_kit/unit_test/*", "makes its data by a CUDA kernel"),
    (f"{_PLUGIN}*_big_table.py", "needs 100 GB of memory: a table of 41 million rows, in float64 first"),
    (f"{_PLUGIN}*/dynamic_variable_test.py", "upstream leaves it out: needs the optimizers of TensorFlow 2.10"),
    ("hps_trt/*", NOT_HERE["tensorrt"]),
    ("docs/*hps_trt*", NOT_HERE["tensorrt"]),
    ("notebooks/multi-modal-data/*", NOT_HERE["nvtabular"]),
    ("notebooks/prototype_*", "explains GPU kernels; does not use HugeCTR"),
)
"""Pattern of files -> why they are not run."""

MISTAKES = (
    ("*sok_to_hps_dlrm_demo.ipynb", "No module named 'utils'", "imports a file of SOK 1, which 23.12 removed"),
    (
        "notebooks/hps_demo.ipynb",
        "operands could not be broadcast together",
        "4.3.1 compares 2,048 scores with the 1,024 of its own training",
    ),
    (
        "*din_fp32_1gpu.json",
        "reshape_reduce_item_his",
        "one of its layers has the names of its bottom and its top exchanged; its Python twin has them right",
    ),
    ("*dcn_ebc.json", "JSONDecodeError", "its training file is not JSON: a comma before the end of an object"),
    (
        "*criteo_parquet_multi_slots_1gpu.json",
        "inputs [26*B, 1], [B, 1]",
        "it makes 26 rows of each sample; upstream compares the first B of them with the labels of B other samples",
    ),
)
"""Pattern of titles, part of the error, and the mistake of upstream's that it comes from."""

STOPS = (
    ("notebooks/hps_demo.ipynb", "wget https://github.com/redis", "downloads Redis and builds it"),
    ("*_triton_deployment_demo.ipynb", "!curl localhost:8000", NOT_HERE["tritonclient"]),
    ("notebooks/*", "!pkill", "ends programs of the whole machine by their name"),
)
"""Pattern of notebooks, part of a cell, and why a notebook ends before the first such cell."""

_WDL_MODEL = ("/hugectr/wdl0_sparse_2000.model", "/hugectr/wdl1_sparse_2000.model")
ARGUMENTS = {
    "test/pybind_test/dcn_inference.py": ["test/scripts/dcn_inference.json", "DCN", "/hugectr/dcn_csr.txt"],
    "test/pybind_test/din_fp32.py": ["--vvgpu", "0"],
    "test/inference/hps/hpsdlpack.py": ["hps_demo", ",".join(_WDL_MODEL), "/hugectr/first_ten.csv"],
    "test/inference/hps/lookup_session_test.py": ["hps_demo", ",".join(_WDL_MODEL), "/hugectr/first_ten.csv"],
    "test/embedding_collection_test/dlrm_train_ftrl.py": ["--shard_plan", "hybrid", "--optimizer", "ftrl"],
    "samples/ftrl/dlrm_train_ftrl.py": ["--shard_plan", "round_robin", "--optimizer", "ftrl"],
    "samples/dlrm/train.py": [
        "--batchsize", "256", "--batchsize_eval", "256", "--max_eval_batches", "2", "--max_iter", "20",
        "--eval_interval", "10", "--num_gpus_per_node", "1",
    ],
}  # fmt: skip
"""File -> its arguments, of those that `_runs` does not find out."""
for _name, _tables in (("wdl_multitable", 2), ("movielens_nodense", 1)):
    ARGUMENTS[f"test/pybind_test/{_name}_test.py"] = [
        "scored", "/hugectr/scored/graph.json", "/hugectr/scored/dense.model",
        ",".join(f"/hugectr/scored/table{number}.model" for number in range(_tables)), "/hugectr/scored/samples",
    ]  # fmt: skip
for _name in ("dcn_inference", "wdl_multitable_test", "movielens_nodense_test"):
    ARGUMENTS[f"test/inference/inference_session/{_name}.py"] = ARGUMENTS[f"test/pybind_test/{_name}.py"]

MODEL_TYPES = {"BST": 23, "CRITEO": 26, "DCNV1": 26, "DCNV2": 26, "DEEPFM": 26, "WDL": 28}
"""Models of ``model_test.py`` -> their slots."""

_BY_NAME = {
    "output_dir": "etc_output",
    "temp_dir": "etc_output",
    "export_path_prefix": "exported/",
    "use_host_ps": "true",
}
"""Names that scripts give to their positional arguments -> the arguments."""

_ROOTS = (
    "test",
    "samples",
    "tools/data_generator",
    "notebooks",
    "hps_torch",
    "hps_tf",
    "hps_trt",
    "docs",
    "onnx_converter",
    *(folder.rstrip("/") for folder in SOK),
)
_PACKAGES = "hugectr|hugectr2onnx|hps_torch|hierarchical_parameter_server|sparse_operation_kit"
_USES = re.compile(rf"^\s*(?:import|from)\s+({_PACKAGES})\b", re.M)
_IMPORTS = re.compile(r"^\s*(?:import|from)\s+([A-Za-z_][A-Za-z_0-9]*)", re.M)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A file of upstream and how it is run.

    Attributes:
        path: The file below the checkout.
        arguments: Its arguments.
        reason: Why it is not run; empty if it is.
        chain: Cases of one chain run one after another in one folder.
        processes: Number of processes that mpirun starts; 1 for none of it.
    """

    path: str
    arguments: tuple[str, ...] = ()
    reason: str = ""
    chain: str = ""
    processes: int = 1

    @property
    def title(self) -> str:
        """The file with its arguments, for the table."""
        shown = [one for one in self.arguments if one.startswith("test/scripts/") or one in MODEL_TYPES]
        processes = [f"({self.processes} processes)"] if self.processes > 1 else []
        return " ".join([self.path, *(Path(argument).name for argument in shown), *processes])

    @property
    def group(self) -> str:
        """Kind of the file, for the summary."""
        parts = self.path.split("/")
        if self.path.endswith(".md"):
            return "documentation"
        if self.path.startswith(SOK):
            return "Sparse Operation Kit"
        if self.path.endswith(".ipynb"):
            return "notebooks"
        if "inference" in self.path or parts[0].startswith("hps"):
            return "inference and HPS"
        if {"etc", "mos", "prefetch"} & set(Path(self.path).stem.split("_")):
            return "training cache"
        if "onnx" in self.path:
            return "ONNX"
        return "samples" if parts[0] == "samples" else "training"

    @property
    def is_training_file(self) -> bool:
        """Whether it is a training file of 2.3 to 3.0 instead of a script."""
        return self.path.endswith(".json")


def find_cases(checkout: Path, patterns: tuple[str, ...] = ()) -> list[Case]:
    """Return the cases of a checkout whose path or title fits one of `patterns`, in their order."""
    files = [file for root in _ROOTS for file in sorted((checkout / root).rglob("*")) if file.suffix in _SUFFIXES]
    cases = [case for file in files for case in _cases(checkout, file.relative_to(checkout).as_posix())]
    return [case for case in cases if not patterns or _fits(case, patterns)]


_SUFFIXES = (".py", ".ipynb", ".md", ".json")
_IMPLEMENTATION = ("hps_torch/hps_torch/", "hps_tf/hierarchical_parameter_server/", "onnx_converter/hugectr2onnx/")
"""Upstream's packages themselves, in place of which terarec's are imported."""


def _fits(case: Case, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, f"*{pattern}*") for pattern in patterns for name in (case.path, case.title))


def _cases(checkout: Path, path: str) -> list[Case]:
    if path.startswith(_IMPLEMENTATION) or path.endswith("setup.py") or "/examples/examples/" in path:  # a copy
        return []
    text = (checkout / path).read_text(errors="replace")
    if path.endswith(".json"):
        # Later releases start training files by a script of the tests.
        is_started = (checkout / "test" / "pybind_test" / "single_node_test.py").exists()
        return [] if is_started or not _is_training(checkout / path) else [Case(path=path, chain=path)]
    is_page = path.endswith(".md")
    if is_page and "```python" not in text:
        return []
    try:
        code = code_of(path, text)
    except ValueError as error:
        return [Case(path=path, reason=f"it is not a notebook: no JSON from {error} on")]
    if not is_page and not _USES.search(code):
        return []
    for pattern, reason in NOT_RUN:
        if fnmatch.fnmatch(path, pattern):
            return [Case(path=path, reason=reason)]
    if not is_page:
        for package in _IMPORTS.findall(code):
            # A script of the tests that needs TensorFlow only at its end is run up to there.
            if package in NOT_HERE:
                return [Case(path=path, reason=NOT_HERE[package])]
    if path.startswith(SOK):
        return [Case(path=path, processes=number, chain=f"{path} {number}") for number in _processes(path, text)]
    processes = 2 if "mpi" in Path(path).stem.split("_") else 1
    return [
        Case(path=path, arguments=arguments, chain=_chain(path, arguments), processes=processes)
        for arguments in _runs(checkout, path, text)
    ]


_ALONE = ("sparse_read_evict", "with_sample_key_zero", "/variable/")
"""Tests of the plugin that upstream starts on one process, or whose checks are about one."""


def _processes(path: str, text: str) -> tuple[int, ...]:
    return (1,) if "horovod" not in text or any(name in path for name in _ALONE) else (1, 2)


def code_of(path: str, text: str) -> str:
    """Return the Python code of a file: of a notebook, that of its cells and of the files that they write."""
    if not path.endswith(".ipynb"):
        return text
    from tools.upstream_files.pages import notebook_code  # reads JSON

    return notebook_code(text, path)


def _runs(checkout: Path, path: str, text: str) -> list[tuple[str, ...]]:
    if "--json-file" in text:
        is_several = "multi_node" in path
        scripts = sorted((checkout / "test" / "scripts").glob("*.json"))
        chosen = [file for file in scripts if ("node" in file.name) == is_several and _is_training(file)]
        if "must be parquet" in text:  # later releases read no other format
            chosen = [file for file in chosen if '"Parquet"' in file.read_text()]
        return [("--json-file", f"test/scripts/{file.name}") for file in chosen]
    if path.endswith("/model_test.py"):
        few = (
            "--vvgpu",
            "0",
            "--batchsize",
            "256",
            "--batchsize_eval",
            "256",
            "--max_iter",
            "20",
            "--eval_interval",
            "10",
        )
        sizes = {kind: ",".join(["100"] * slots) for kind, slots in MODEL_TYPES.items()}
        return [("--model_type", kind, *few, "--slot_size_array", sizes[kind]) for kind in sizes]
    names = re.findall(r"^\s*(\w+)\s*=\s*sys\.argv\[\d\]", text, re.M)
    if path not in ARGUMENTS and names and names[0] == "json_file" and _BY_NAME.keys() >= {*names[1:]}:
        return [(f"test/scripts/{_training_file(checkout, path).name}", *(_BY_NAME[name] for name in names[1:]))]
    return [tuple(ARGUMENTS.get(path, ()))]


def _training_file(checkout: Path, path: str) -> Path:
    """Return the training file of the model that a script's name tells: with the most words of it and the fewest other.

    Upstream's jobs start each script with that one; it has the format of the data that the script reads.
    """
    words = set(Path(path).stem.split("_"))
    formats = set(re.findall(r"DataReaderType_t\.(\w+)", (checkout / path).read_text(errors="replace")))

    def fit(file: Path) -> tuple[bool, int, int]:
        of_file, found = file.stem.split("_"), re.search(r'"format":\s*"(\w+)"', file.read_text())
        is_other = bool(formats) and (found.group(1) if found else "Norm") not in formats
        return is_other, -len(words & set(of_file)), len(of_file)

    files = [file for file in sorted((checkout / "test" / "scripts").glob("*.json")) if _has_layers(file)]
    return min(files, key=fit)


def _is_training(file: Path) -> bool:
    text = file.read_text()
    return '"solver"' in text and '"source"' in text and '"inference"' not in text


def _has_layers(file: Path) -> bool:
    text = file.read_text()
    return '"layers"' in text and '"inference"' not in text


def _chain(path: str, arguments: tuple[str, ...]) -> str:
    """Return the folder that a case runs in; converters run where the models of their scripts were trained."""
    if path.endswith("mmoe_inference.py"):
        return "onnx mmoe"
    if "onnx_converter_test" in path:
        stem = Path(path).stem.removeprefix("hugectr2onnx_").removesuffix("_test")
        trained_with = {"deepfm": "dcn", "dlrm": "dcn", "dlrm_mlp": "dcn", "gmf": "ncf", "neumf": "ncf"}
        kind = re.sub(r"_(parquet|try|avg_pooling)$", "", stem)
        return f"onnx {trained_with.get(kind, kind)}"
    if re.search(r"_mos_.*high_level", path):
        return f"mos {'_mpi_' in path}"  # half of them continue what the others, from scratch, have trained
    return " ".join([path, *arguments])


def stop_of(path: str, cells: Sequence[str]) -> tuple[int, str] | None:
    """Return the first cell of a notebook that is not run by `STOPS`, and the reason; None if all are."""
    for number, cell in enumerate(cells):
        for pattern, part, reason in STOPS:
            if fnmatch.fnmatch(path, f"*{pattern}") and part in cell:
                return number, reason
    return None


def in_chains(cases: list[Case]) -> list[list[Case]]:
    """Return the cases by chain: scripts that train a model before those that convert or continue it."""
    chains: dict[str, list[Case]] = {}
    for case in cases:
        chains.setdefault(case.chain or case.title, []).append(case)
    return [
        sorted(chain, key=lambda case: not re.search("train_scripts|scratch", case.path)) for chain in chains.values()
    ]
