"""``python -m diloco`` is the command `diloco`."""

import sys

from diloco.cli import main

if __name__ == "__main__":
    sys.exit(main())
