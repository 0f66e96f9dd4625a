# SPDX-License-Identifier: Apache-2.0
"""Raw compute without gradients: `ref` is plain PyTorch and the oracle, `cpu` the compiled core.

`registry` selects one of them; `rows` allocates and initialises arenas; `contract` defines the arguments of embedding
kernels. Nothing is imported here: preparing data needs the encoding kernels alone, and they need no torch.
"""
