"""The command line as ``python -m terarec``, which launchers such as torchrun start."""

from terarec.cli import main

if __name__ == "__main__":
    main()
