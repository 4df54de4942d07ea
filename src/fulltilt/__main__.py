"""The `fulltilt` command, also as `python -m fulltilt`."""

import sys


def main() -> None:
    """Bring the command in and run it. Whoever changes their mind meanwhile gets no traceback for it."""
    try:
        from fulltilt.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
