"""A step that is tried, and the row that it becomes."""

import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.real.rows import Row, write
from benchmarks.real.running import RefusedError, WrongError


@dataclass
class Tries:
    """The rows of one group, as they come.

    Attributes:
        group: of all rows.
        commit: of the package.
        hidden: texts that commands contain and rows don't, such as temporary folders, and what rows have instead.
    """

    group: str
    commit: str
    hidden: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def __call__(self, name: str, thing: str, command: Callable[[], str] | str, step: Callable[[], str]) -> bool:
        """Take a step, which returns its figures, and append its row. Return whether it was right."""
        begun = time.perf_counter()
        try:
            outcome, says = "right", step()
        except RefusedError as error:
            outcome, says = "refused", str(error)
        except WrongError as error:
            outcome, says = "FAILED", str(error)
        except Exception as error:  # of a library, when it reads what the package wrote
            traceback.print_exc()
            outcome, says = "FAILED", f"{type(error).__name__}: {error}"[:400]
        took_s = round(time.perf_counter() - begun, 1)
        line = command if isinstance(command, str) else command()
        row = Row(
            self.group,
            name,
            thing,
            self.plain(line),
            outcome,
            self.plain(says),
            time.strftime("%Y-%m-%d"),
            self.commit,
            took_s,
        )
        self.rows.append(row)
        write([row])
        print(f"{row.outcome:8} {self.group} {name} ({took_s} s): {row.says[:300]}", flush=True)
        return outcome == "right"

    def plain(self, text: str) -> str:
        for long, short in sorted(self.hidden.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(long, short)
        return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", text)
