"""Run the command `diloco` as ``python -m diloco``."""

import os
import sys


def main() -> int:
    """Run the command of this process. Ctrl-C and SIGTERM end it quietly also while it is imported."""
    try:
        from diloco.signals import ended_by_sigterm

        with ended_by_sigterm():
            from diloco.cli import main

            code = main()
    except KeyboardInterrupt:
        return 130
    if code and _has_process_groups():
        # their threads wait for ranks that are lost, and would abort the process (exit code -6) at its regular end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _has_process_groups() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


if __name__ == "__main__":
    sys.exit(main())
