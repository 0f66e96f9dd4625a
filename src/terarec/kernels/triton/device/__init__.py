"""Device code: what `triton.jit` compiles. Offsets are int64 throughout, since rows * width passes 2^31.

Loops with bounds that are known only on the device are written with ``while``: Triton 3.6's interpreter cannot count
``range`` over them with NumPy 2.4.
"""
