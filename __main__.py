"""``python -m penstock``, and so ``torchrun -m penstock``: the ``penstock`` command."""

from .scripts.command import main

if __name__ == "__main__":
    main()
