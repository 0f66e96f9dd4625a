"""What is learnt of numbers from a stream of blocks: sums without rounding, and samples by hash."""
