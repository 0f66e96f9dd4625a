# SPDX-License-Identifier: Apache-2.0
"""The name ``hierarchical_parameter_server`` on a search path, which leads to terarec's module."""

import sys

from terarec.hugectr import hps_tf
from terarec.hugectr.command_line import provide_modules

# The import system returns what this leaves in `sys.modules` under the name.
provide_modules()
sys.modules[__name__] = hps_tf
