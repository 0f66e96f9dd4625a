"""Raw logs -> a data set by a feature workflow, which does the same to raw records. Described in docs/workflows.md."""
