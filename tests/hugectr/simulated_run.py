# SPDX-License-Identifier: Apache-2.0
"""``terarec.hugectr`` in a process that has a simulated device of its own: ``simulated_run LIBRARY SCRIPT ...``."""

import sys
from pathlib import Path

from terarec.hugectr import compilation
from terarec.hugectr.command_line import main
from tests.dist.device_matrix import device_of

if __name__ == "__main__":
    library, *words = sys.argv[1:]
    device = device_of(Path(library))
    compilation.placement_of_rank = lambda vvgpu, together, num_gpus=None: (device, "")
    sys.exit(main(words))
