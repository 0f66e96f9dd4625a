# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel against the plain ones, interpreted on the CPU; ``benchmarks/gpu.py`` compiles the same cases."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is installed on Linux alone")

from tests.kernels.triton_cases import CASES
from tests.params import in_every_run

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {
    "claim_kernel",
    "count_low_kernel",
    "dots_kernel",
    "fill_kernel",
    "find_kernel",
    "heads_kernel",
    "key_parts_kernel",
    "locate_kernel",
    "lookup_kernel",
    "part_parts_kernel",
    "squares_kernel",
    "starts_kernel",
    "update_kernel",
    "winners_kernel",
    "write_low_kernel",
}


SLOW = {
    "a_hot_key_is_summed_in_parts",
    "all_rows_move_in_the_global_mode",
    "an_update_gives_the_same_bits_every_time",
    "gradients_of_every_shape_are_summed",
    "gradients_are_scaled_clipped_and_regularised",
    "rates_in_the_momentum_and_epsilon_hat",
    "rows_catch_up_in_the_lazy_global_mode",
    "rows_of_tiles_with_fewer_rows_than_threads_are_updated_in_every_form",
    "tables_have_learning_rates_of_their_own",
    "the_host_does_not_wait_for_keys_that_it_has_found",
    "the_sum_of_a_row_depends_on_its_keys_alone",
}
"""Forms of an update that another case launches, too; an interpreter runs nothing at once whose order could vary."""


@pytest.mark.parametrize("name", in_every_run(CASES.keys() - SLOW, CASES))
def test_triton(name):
    CASES[name](torch.device("cpu"))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("cuda",), marks=pytest.mark.slow),
        pytest.param(("cuda", "--all"), marks=pytest.mark.slow),
        pytest.param(("hip", "--all"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_every_kernel_compiles_to_machine_code(arguments, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, "-m", "tests.kernels.triton_compile", *arguments]
    result = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert {line.split()[0] for line in result.stdout.splitlines()} == KERNELS
