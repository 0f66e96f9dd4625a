"""The kernels in plain PyTorch and NumPy: the oracle of the tests, and what runs where nothing faster does."""
