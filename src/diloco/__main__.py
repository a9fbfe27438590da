"""Run the command `diloco` as ``python -m diloco``."""

import sys

from diloco.cli import main

if __name__ == "__main__":
    sys.exit(main())
