"""Raw compute without gradients: `ref` is plain PyTorch and the oracle, `cpu` the compiled core.

`registry` chooses between them; `rows` allocates and initialises arenas; `contract` says what an embedding kernel
takes, `encoding_types` what an encoding kernel gives. Nothing is imported here: preparing data needs the encoding
kernels alone, and they need no torch.
"""
