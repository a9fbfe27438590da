"""Flags of `diloco evaluate` that mean nothing together."""

from __future__ import annotations

import pytest

from diloco.cli import main


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--text-field", "body"], "--text-field 'body' needs --data PATH"),
        (["--document-separator", "x"], "--document-separator 'x' needs --data PATH"),
        (["--sequences", "3", "--stride", "8"], "--sequences 3 cannot be combined with --stride"),
        (["--sequences", "3", "--by-document"], "--sequences 3 cannot be combined with --by-document"),
        (["--batch-size", "0"], "--batch-size 0 must be 1 or more"),
        (["--device", "gpu"], "--device='gpu' is no device"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_is_read(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "absent", *flags]) == 2
    assert words in capsys.readouterr().err
