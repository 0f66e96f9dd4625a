"""The sides of peers.py, each run in a process of its own by `worker`, in the interpreter that has its libraries."""
