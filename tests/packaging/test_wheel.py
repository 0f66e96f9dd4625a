"""The wheel: holds the compiled core, links neither torch nor an OpenMP runtime, imports on its own."""

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def needed_libraries(module: Path) -> str:
    return subprocess.run(["ldd", str(module)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["_embedding", "_encoding"])
@pytest.mark.skipif(sys.platform != "linux", reason="ldd reads ELF files")
def test_the_core_links_neither_torch_nor_openmp(name: str) -> None:
    import terarec

    (module,) = (Path(terarec.__file__).parent / "kernels" / "cpu").glob(f"{name}.*.so")
    libraries = needed_libraries(module)
    assert "torch" not in libraries
    assert "omp" not in libraries


def test_the_version_is_the_same_in_code_and_metadata() -> None:
    import terarec

    assert metadata.version("terarec") == terarec.__version__


@pytest.mark.slow
def test_a_built_wheel_works_without_the_source_tree(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("terarec-*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    program = (
        "import terarec, torch, terarec.kernels.cpu._embedding, terarec.kernels.cpu._encoding;"
        "from terarec.kernels.registry import active; assert active('bag_lookup', 'cpu').implementation == 'cpu';"
        "print(terarec.__file__)"
    )
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}
    run = [sys.executable, "-c", program]
    result = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    assert result.stdout.strip().startswith(str(site))
