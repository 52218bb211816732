"""The installed command, and `python -m charm_megatron`."""

import sys


def main() -> None:
    """Runs the command line. Ctrl-C while it is still being imported is no traceback either."""
    try:
        from charm_megatron.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
