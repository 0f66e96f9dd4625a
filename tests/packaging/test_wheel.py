# SPDX-License-Identifier: Apache-2.0
"""The wheel: holds the compiled core, links neither torch nor an OpenMP runtime, imports on its own."""

import subprocess
import sys
import venv
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def needed_libraries(module: Path) -> str:
    return subprocess.run(["ldd", str(module)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["_embedding", "_encoding", "_rowfile", "_tensorflow"])
@pytest.mark.skipif(sys.platform != "linux", reason="ldd reads ELF files")
def test_the_core_links_neither_torch_nor_openmp(name: str) -> None:
    libraries = needed_libraries(Path(str(import_module(f"terarec.kernels.cpu.{name}").__file__)))
    assert "torch" not in libraries
    assert "omp" not in libraries


@pytest.mark.parametrize("made", ["_embedding.HashIndex(2)", "_encoding.Int64Counts()"])
def test_an_object_that_others_keep_to_the_end_is_not_reported_as_a_leak(made: str) -> None:
    """As torch keeps the data set of a worker that its DataLoader has spawned."""
    program = (
        f"import ctypes; from terarec.kernels.cpu import {made.split('.')[0]};"
        f"ctypes.pythonapi.Py_IncRef(ctypes.py_object({made}))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr == ""


@pytest.mark.slow
def test_a_built_wheel_works_without_the_source_tree(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("terarec-*.whl")
    python = environment_with(wheel, tmp_path / "environment")
    program = (
        "import terarec, torch, terarec.kernels.cpu._embedding, terarec.kernels.cpu._encoding;"
        "from terarec.kernels.registry import active; assert active('bag_lookup', 'cpu').implementation == 'cpu';"
        "from terarec.apps.recipes import load_recipe_data, recipe_names; list(map(load_recipe_data, recipe_names()));"
        "assert recipe_names();"
        "print(terarec.__file__)"
    )
    environment = {"PATH": "/usr/bin:/bin"}
    run = [python, "-c", program]
    result = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    assert Path(result.stdout.strip()).is_relative_to(tmp_path / "environment")
    assert subprocess.run([python.with_name("terarec"), "--version"], env=environment, check=True).returncode == 0


def environment_with(wheel: Path, directory: Path) -> Path:
    """The Python of a new virtual environment that has the wheel, and this environment's libraries behind it.

    H1: PYTHONPATH is not enough, since the finder of an installation in place comes before it.
    """
    venv.create(directory)
    python = directory / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site,) = directory.glob("lib/python*/site-packages")
    # A directory that a .pth file names is searched; the .pth files in it, such as that of the finder, are not read.
    (site / "libraries.pth").write_text("".join(f"{path}\n" for path in libraries))
    return python
