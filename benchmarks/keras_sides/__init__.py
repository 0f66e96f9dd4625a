"""The sides of hugectr_keras.py, each run by `worker` in a process and an interpreter of its own."""
