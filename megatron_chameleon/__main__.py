"""Run a command: ``python -m megatron_chameleon COMMAND``, also under torchrun."""

from megatron_chameleon.commands import main

if __name__ == "__main__":
    main()
