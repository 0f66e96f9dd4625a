"""The single-machine engine: fits a workflow's operators on the training part, then encodes and writes every row."""
