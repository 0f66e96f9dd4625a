# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs, and how it is said."""

import pytest

from terarec.errors import KernelError
from terarec.kernels import registry
from terarec.kernels.cpu import host
from terarec.kernels.registry import active, available
from tests.errors import at
from tests.processes import run_new_python, run_python


def test_the_core_is_built_and_the_fastest_on_the_cpu():
    assert available()["cpu"] == available()["ref"] == ""
    assert active("bag_lookup", "cpu") == registry.Choice(implementation="cpu", why="the fastest on cpu")


def test_other_devices_fall_back_and_say_so_once(caplog):
    registry.choose.cache_clear()
    first = registry.choose("bag_lookup", "meta")
    assert registry.choose("bag_lookup", "meta") is first
    assert [record.message for record in caplog.records] == [
        "bag_lookup on meta runs the ref kernel (triton: runs on cuda, not on meta; cpu: runs on cpu, not on meta)"
    ]


def test_what_is_requested_by_name_runs_or_raises():
    assert registry.choose("row_update_", "cpu", "ref").__module__ == "terarec.kernels.ref.row_update"
    with pytest.raises(KernelError, check=at("bag_lookup")):
        registry.choose("bag_lookup", "cuda", "cpu")
    with pytest.raises(KernelError, check=at("op", "got 'sort'")):
        registry.choose("sort", "cpu")
    with pytest.raises(KernelError, check=at("implementation")):
        registry.choose("bag_lookup", "cpu", "tpu")


def test_an_op_without_implementation_on_a_device_is_rejected():
    with pytest.raises(KernelError, check=at("op", "got 'sort'")):
        active("sort", "cpu")


@pytest.mark.slow
def test_triton_is_neither_loaded_nor_taken_where_it_would_only_interpret():
    program = (
        "import sys; from terarec.kernels.registry import active, available, choose\n"
        "print(active('bag_lookup', 'cpu').implementation, available()['triton'], 'triton' in sys.modules, sep=', ')\n"
        "choose('bag_lookup', 'cpu', 'triton')"
    )
    # `run_python` forks a process that has loaded torch's compiler, and so Triton.
    reported = run_new_python(program, environment={"TRITON_INTERPRET": "0"})
    assert reported.stdout.strip() in ("cpu, no CUDA device is there, False", "cpu, Triton is not installed, False")
    assert "implementation 'triton' cannot run on cpu: runs on cuda, not on cpu" in reported.stderr


def test_triton_requested_by_name_interprets():
    pytest.importorskip("triton")
    assert registry.choose("bag_lookup", "cpu", "triton").__module__ == "terarec.kernels.triton.bag_lookup"
    with pytest.raises(KernelError, check=at("allocate_rows")):
        registry.choose("allocate_rows", "cpu", "triton")


def test_the_environment_puts_an_implementation_first():
    program = (
        "from terarec.kernels.registry import active\n"
        "print(*(active(op, 'cpu').implementation for op in ('bag_lookup', 'lookup_fits', 'allocate_rows')))"
    )
    assert run_python(program, environment={"TERAREC_KERNELS": "ref"}).stdout.split() == ["ref", "ref", "ref"]
    rejected = run_python(program, environment={"TERAREC_KERNELS": "triton", "TRITON_INTERPRET": "0"})
    assert "TERAREC_KERNELS: got 'triton', which does not run here: " in rejected.stderr
    rejected = run_python(program, environment={"TERAREC_KERNELS": "tpu"})
    assert "TERAREC_KERNELS: got 'tpu', expected one of triton, cpu, ref" in rejected.stderr


def test_the_environment_selects_triton_for_its_ops():
    pytest.importorskip("triton")
    program = (
        "from terarec.kernels.registry import active, choose\n"
        "print(*(active(op, 'cpu').implementation for op in ('bag_lookup', 'lookup_fits', 'allocate_rows')))\n"
        "print(choose('row_update_', 'cpu').__module__)"
    )
    reported = run_python(program, environment={"TERAREC_KERNELS": "triton", "TRITON_INTERPRET": "1"}).stdout.split()
    assert reported == ["triton", "cpu", "cpu", "terarec.kernels.triton.row_update"]


@pytest.mark.slow
def test_the_environment_forces_an_instruction_set():
    program = "from terarec.kernels.cpu.host import features; print(features())"
    assert run_new_python(program, environment={"TERAREC_CPU": "generic"}).stdout.strip() == "generic"
    rejected = run_new_python("import terarec.kernels.cpu.host", environment={"TERAREC_CPU": "sse9"})
    assert "TERAREC_CPU: got 'sse9', expected one of generic, avx2, avx512, neon" in rejected.stderr


def test_an_instruction_set_that_the_cpu_lacks_is_rejected():
    for name in {"generic", "avx2", "avx512", "neon"} - set(host.instruction_sets()):
        with pytest.raises(KernelError, check=at("CPU kernels", f"got '{name}', expected one of")):
            host.select(name)
    with pytest.raises(KernelError, check=at("CPU kernels", "got 'sse9'")):
        host.select("sse9")


def test_torchs_threads_are_shared():
    program = (
        "import os, torch; from terarec.kernels.cpu import _embedding, host\n"
        "torch.set_num_threads(2); a = torch.randn(700, 700); a @ a\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "_embedding.allocate_rows([64, 1024, 1024], 2); a @ a\n"
        "print(host.threads()[0], host.threads()[1].split()[0], len(os.listdir('/proc/self/task')) - before)"
    )
    assert run_python(program).stdout.split() == ["2", "openmp", "0"]


def test_plain_threads_are_used_without_openmp():
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('_embedding', sys.argv[1])\n"
        "core = importlib.util.module_from_spec(spec); spec.loader.exec_module(core)\n"
        "print(core.parallel_runtime(), float(core.allocate_rows([3, 1024, 1024], 3).sum()))"
    )
    path = host._embedding.__file__
    result = run_new_python(program, path)
    assert result.stdout.split() == ["std::thread", "0.0"], result.stderr
