# SPDX-License-Identifier: Apache-2.0
"""Try the cases of a module on the simulated device: ``run_cases LIBRARY KERNELS MODULE [CASE_LEFT_OUT]...``.

It prints a line for each case and the error of each wrong one; the exit status is 1 if there is one.
"""

import importlib
import sys
import traceback
from pathlib import Path

import torch

from tests.simulated_device.device import register, treat_as_gpu


def main(library: str, kernels: str, module: str, *left_out: str) -> int:
    """Return the exit status."""
    torch.set_num_threads(1)
    device = register(Path(library))
    treat_as_gpu(interprets_triton=kernels == "triton")
    cases = importlib.import_module(module).CASES
    is_wrong = False
    for name in [name for name in cases if name not in left_out]:
        try:
            cases[name](device)
        except BaseException as error:  # what pytest raises leaves the other cases to try
            is_wrong = True
            print(f"WRONG {name}")
            traceback.print_exception(error, limit=-6, file=sys.stdout)
        else:
            print(f"right {name}")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
