"""What ``terarec doctor`` asks the installation: versions, optional extras, and whether a GPU could be used."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import terarec

_LIBRARIES = ("numpy", "pyarrow", "safetensors", "typer", "rich")
EXTRAS = {
    "serve": ("starlette", "uvicorn"),
    "report": ("matplotlib",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow-skinny",),
}
"""Optional extra -> what it installs, as pyproject.toml has it."""


def versions() -> dict[str, str | None]:
    """Versions of terarec, Python, the system and the libraries that terarec stands on."""
    import torch

    return {
        "terarec": terarec.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.platform(),
        "torch": torch.__version__,  # with the build, such as +cu130, which the package's metadata may lack
        **{name: _version(name) for name in _LIBRARIES},
    }


def extras() -> list[dict[str, Any]]:
    """Each library of an optional extra, and its version; None where it is not installed."""
    return [
        {"extra": extra, "library": library, "version": _version(library)}
        for extra, libraries in EXTRAS.items()
        for library in libraries
    ]


def gpu() -> dict[str, Any]:
    """Whether torch could use a GPU, and if not why not."""
    import torch

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
