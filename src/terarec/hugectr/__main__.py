# SPDX-License-Identifier: Apache-2.0
"""``python -m terarec.hugectr``."""

import sys

from terarec.hugectr.command_line import main

if __name__ == "__main__":
    sys.exit(main())
