# SPDX-License-Identifier: Apache-2.0
"""The interfaces of HugeCTR's releases: calls and parameters in TOML files, and the validation by them."""
