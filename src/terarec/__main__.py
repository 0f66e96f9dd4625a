# SPDX-License-Identifier: Apache-2.0
"""The command line as ``python -m terarec``, which launchers such as torchrun start."""

from terarec.cli import main

# Spawned processes import this module under another name, and must not run the command again.
if __name__ == "__main__":
    main()
