# SPDX-License-Identifier: Apache-2.0
"""The sides of hugectr_keras.py; `worker` runs each in its own process and interpreter."""
