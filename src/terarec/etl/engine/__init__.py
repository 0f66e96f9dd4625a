# SPDX-License-Identifier: Apache-2.0
"""The single-machine engine: fits a workflow's operators on the training part, then encodes and writes every row."""
