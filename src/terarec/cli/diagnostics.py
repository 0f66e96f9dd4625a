# SPDX-License-Identifier: Apache-2.0
"""Checks of ``terarec doctor``: versions, the machine, the selected kernels with reasons, and their correctness."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import terarec
from terarec.errors import KernelError
from terarec.kernels.processor import processor_name
from terarec.kernels.registry import active, available
from terarec.nn.precision import fast_precisions
from terarec.ops import BagLayout, bag_lookup
from terarec.ops.onednn import linear_choice
from terarec.ops.row_update import BagGradient, row_rule, row_update_
from terarec.spec import Pooling
from terarec.train.devices import active_kernels, describe_device, resolve_device


def examine() -> dict[str, Any]:
    """Return everything that ``terarec doctor`` shows, as JSON data; docs/cli.md describes it."""
    results = check()
    return {
        "ok": results["passed"],
        "versions": versions(),
        "cpu": processor(),
        "memory": {**memory(), "transparent_huge_pages": huge_pages()},
        "disk": disk(Path.cwd()),
        # After the check, which has made the compiled core look for its threads.
        "threads": {**threads(), "openmp_runtimes": openmp_runtimes()},
        "kernels": choices(),
        "gpu": gpu(),
        "training": training(),
        "extras": extras(),
        "check": results,
    }


_FEATURES = {
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx512f": "avx512f",
    "avx512_bf16": "avx512_bf16",
    "amx_bf16": "amx_bf16",
    "asimd": "neon",
    "bf16": "bf16",
}
"""Names in /proc/cpuinfo (x86 flags, Arm features) that matter for the kernels -> what we call them."""


def processor() -> dict[str, Any]:
    """Return the model, features that kernels care about, cores of the machine and cores that this process may use."""
    text = _read("/proc/cpuinfo") or ""
    # The first processor stands for all; x86 has "flags", Arm "Features".
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    words = set(flags.group(1).split()) if flags else set()
    return {
        "model": processor_name(),
        "architecture": platform.machine(),
        "features": [ours for theirs, ours in _FEATURES.items() if theirs in words],
        "cores": os.cpu_count(),
        "usable_cores": _usable_cores(),
    }


def memory() -> dict[str, Any]:
    """Return bytes of memory: installed, free for use now, and this container's limit (None for no limit)."""
    text = _read("/proc/meminfo") or ""
    kibibytes = {name: int(count) for name, count in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    total = kibibytes.get("MemTotal")
    available = kibibytes.get("MemAvailable")
    # The second generation of cgroups, then the first.
    limit = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes") or ""
    # The first generation of cgroups writes a number near 2^63 for "no limit".
    limited = limit.isdecimal() and int(limit) < 1 << 60
    return {
        "total_bytes": None if total is None else total * 1024,
        "available_bytes": None if available is None else available * 1024,
        "container_limit_bytes": int(limit) if limited else None,
    }


def huge_pages() -> str | None:
    """Return the kernel's setting for transparent huge pages: "always", "madvise" or "never"."""
    chosen = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return chosen.group(1) if chosen else None


def disk(path: Path) -> dict[str, Any]:
    """Return room on the disk that holds `path`."""
    usage = shutil.disk_usage(path)
    return {"path": str(path), "total_bytes": usage.total, "free_bytes": usage.free}


def openmp_runtimes() -> list[str]:
    """Return paths of the OpenMP runtimes in this process; more than one would mean two pools on the same cores."""
    mapped = re.findall(r"(/\S*lib(?:gomp|omp|iomp5)[^/\s]*\.so\S*)$", _read("/proc/self/maps") or "", re.MULTILINE)
    return sorted(set(mapped))


def _usable_cores() -> int | None:
    # A container or taskset may allow fewer cores than the machine has; macOS has no such call.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _read(path: str) -> str | None:
    try:
        # Any of these files may be missing in a container, and on another system all are.
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


_LIBRARIES = ("numpy", "pyarrow", "safetensors", "typer", "rich")
EXTRAS = {
    "serve": ("httptools", "uvloop", "orjson", "prometheus-client", "grpcio", "protobuf", "pygrpc-native"),
    "otel": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    "report": ("matplotlib", "jinja2"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "openvino": ("openvino", "onnx", "onnxscript"),
    "spark": ("pyspark",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow-skinny",),
    "rocksdb": ("rocksdict",),
    "redis": ("redis", "hiredis"),
    "kafka": ("confluent-kafka",),
    "ann": ("faiss-cpu",),
    "calibration": ("scipy",),
    "mpi": ("mpi4py",),
    "tensorflow": ("tensorflow", "keras"),
}
"""Optional extra -> what it installs, as pyproject.toml has it."""


def versions() -> dict[str, str | None]:
    """Return versions of terarec, Python, the system and the libraries that terarec depends on."""
    return {
        "terarec": terarec.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.platform(),
        "torch": torch.__version__,  # with the build, such as +cu130, which the package's metadata may lack
        **{name: _version(name) for name in _LIBRARIES},
    }


def extras() -> list[dict[str, Any]]:
    """Return each library of an optional extra, and its version; None where it is not installed."""
    return [
        {"extra": extra, "library": library, "version": _version(library)}
        for extra, libraries in EXTRAS.items()
        for library in libraries
    ]


def gpu() -> dict[str, Any]:
    """Return whether torch could use a GPU, and if not why not."""
    available = torch.cuda.is_available()
    runtime = torch.version.cuda or torch.version.hip
    if available:
        why = "torch sees it; commands use it with --device auto or cuda"
    elif runtime is None:
        why = "this torch is built for the CPU only"
    else:
        why = f"torch is built for {'CUDA' if torch.version.cuda else 'ROCm'} {runtime}, but finds no device or driver"
    return {
        "available": available,
        "why": why,
        "runtime": runtime,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "triton": _version("triton"),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_ROWS, _WIDTH, _NUM_FEATURES, _BATCH = 20_000, 32, 8, 4096
"""A table of 2.5 MiB and 32,768 keys: both implementations together take about 0.1 s."""
_REPEATS = 5
_TOLERANCE = 1e-5
"""Both sum in float32, in different orders; the sums are of magnitude 1."""


def choices() -> list[dict[str, Any]]:
    """Return the implementation of each op that "auto" takes on the CPU, and on a GPU that torch sees, and why."""
    rows = []
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for op in active_kernels(device):
            choice = active(op, device)
            rows.append({"op": op, "device": device, "implementation": choice.implementation, "why": choice.why})
    linear = linear_choice()
    return [*rows, {"op": "linear", "device": "cpu", "implementation": linear.implementation, "why": linear.why}]


def training() -> dict[str, Any]:
    """Return where ``--device auto`` trains, on how many CPU threads, and in which precisions at full speed."""
    device = resolve_device("auto")
    return {
        "device": describe_device(device),
        "threads": torch.get_num_threads(),
        "precisions": fast_precisions(device),
        "kernels": list(dict.fromkeys(active_kernels(device.type).values())),
        "compile": can_compile(),
    }


def can_compile() -> bool:
    """Return whether ``--compile`` works: torch.compile needs a C++ compiler on the CPU, and Triton on a GPU."""
    if torch.cuda.is_available():
        return find_spec("triton") is not None
    return any(shutil.which(compiler) is not None for compiler in ("g++", "clang++"))


def threads() -> dict[str, Any]:
    """Return torch's threads; the compiled core's, the runtime that they belong to, and the instruction set in use."""
    counts: dict[str, Any] = {"torch": torch.get_num_threads()}
    if available()["cpu"]:
        return {**counts, "core": None, "core_runtime": None, "instruction_set": None}
    from terarec.kernels.cpu import host

    count, runtime = host.threads()
    return {**counts, "core": count, "core_runtime": runtime, "instruction_set": host.features()}


def check() -> dict[str, Any]:
    """Look up and update random rows with the compiled core and with plain PyTorch, and compare.

    Returns:
        ``passed``; ``why`` it did not, or None; ``largest_difference`` of any number; rows looked up a second.
    """
    failed: dict[str, Any] = {"passed": False, "largest_difference": None, "lookup_rows_per_second": None}
    if reason := available()["cpu"]:
        return {**failed, "why": f"the compiled core does not load: {reason}"}
    try:
        looked_up, updated = _run("cpu")
        expected_lookup, expected_update = _run("ref")
    except KernelError as error:
        return {**failed, "why": str(error)}
    difference = max(float((looked_up - expected_lookup).abs().max()), float((updated - expected_update).abs().max()))
    passed = difference <= _TOLERANCE
    return {
        "passed": passed,
        "why": None if passed else f"core and reference differ by {difference:g}, expected at most {_TOLERANCE:g}",
        "largest_difference": difference,
        "lookup_rows_per_second": _lookup_rate(),
    }


def _run(implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of a lookup, and the table after an update with a gradient of ones."""
    weights, keys, offsets, layout = _problem()
    pooled = bag_lookup(weights, keys, offsets, layout, implementation=implementation)
    gradient = BagGradient(keys, offsets, torch.full_like(pooled, 1 / _BATCH), layout)
    # SGD has no state, so that the weights alone show whether rows are summed correctly.
    row_update_(weights, (), [gradient], row_rule("sgd", lr=0.1), step=1, implementation=implementation)
    return pooled, weights


def _lookup_rate() -> float:
    weights, keys, offsets, layout = _problem()
    fastest = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        bag_lookup(weights, keys, offsets, layout, implementation="cpu")
        # The fastest: the others measure what else runs on the machine.
        fastest = min(fastest, time.perf_counter() - start)
    return keys.numel() / fastest


def _problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, BagLayout]:
    # The same for both implementations, and without touching the seed of the process.
    generator = torch.Generator().manual_seed(0)
    num_keys = _NUM_FEATURES * _BATCH
    sum_pooling: Pooling = "sum"
    layout = BagLayout(
        table_names=("check",),
        table_base=(0,),
        table_rows=(_ROWS,),
        feature_names=tuple(f"feature {index}" for index in range(_NUM_FEATURES)),
        feature_table=(0,) * _NUM_FEATURES,
        pooling=(sum_pooling,) * _NUM_FEATURES,
        width=_WIDTH,
    )
    weights = torch.rand(_ROWS, _WIDTH, generator=generator)
    keys = torch.randint(_ROWS, (num_keys,), generator=generator)
    return weights, keys, torch.arange(num_keys + 1), layout
