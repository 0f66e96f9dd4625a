# SPDX-License-Identifier: Apache-2.0
"""The sides of peers.py; `worker` runs each in its own process, in the interpreter that has its libraries."""
