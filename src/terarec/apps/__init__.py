# SPDX-License-Identifier: Apache-2.0
"""Satellites of the core: commands and scripts use them, and nothing that trains, prepares or scores needs them."""
