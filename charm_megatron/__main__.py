"""`python -m charm_megatron`."""

from charm_megatron.cli.main import main

if __name__ == "__main__":
    main()
