"""Run the command `diloco` as ``python -m diloco``."""

import sys


def main() -> int:
    """Run the command of this process. Ctrl-C ends it quietly also while it is imported."""
    try:
        from diloco.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
