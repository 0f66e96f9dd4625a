# SPDX-License-Identifier: Apache-2.0
"""The name ``hugectr`` on a search path: importing it leads to terarec's module, under all of HugeCTR's names."""

from terarec.hugectr.command_line import provide_modules

# The import system returns what this leaves in `sys.modules` under the name.
provide_modules()
