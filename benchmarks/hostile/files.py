"""Malicious files: settings, texts, tokenizers, checkpoints and secrets."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.hostile.attack import Attack, Outcome
from benchmarks.hostile.doors import memory_bytes
from diloco.cli import main

__all__ = ["ATTACKS"]

Command = Callable[[Path], Sequence[str]]


def file(name: str, content: bytes, command: Command, suffix: str, before: str = "") -> Attack:
    """Return the attack: the command must accept the file or refuse it with a message, without traceback or escapes."""

    def run() -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"given{suffix}"
            path.write_bytes(content)
            path.chmod(0o600)  # as secrets must have
            output, began_s, before_bytes, ended = io.StringIO(), time.monotonic(), memory_bytes(), 0
            refused = ""
            with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output), contextlib.chdir(folder):
                try:
                    code = main(list(command(path)))
                    refused = "" if code == 0 else f"exit code {code}"
                except Exception as error:  # the user would see a traceback
                    ended, refused = 1, f"{type(error).__name__}"
            shown = output.getvalue().replace("\n", "").replace("\t", "").replace("\r", "")
        return Outcome(
            ended=ended,
            stall_s=round(time.monotonic() - began_s, 2),
            memory_bytes=max(0, memory_bytes() - before_bytes),
            escapes=int(any(ord(each) < 32 or 127 <= ord(each) < 160 for each in shown)),
            refused=refused,
        )

    return Attack(name=name, who="file", where="file", run=run, before=before)


def settings(path: Path) -> list[str]:
    return ["train", str(path), "--print-config"]


def tokenize(path: Path) -> list[str]:
    return ["tokenize", str(path), "--out", str(path.parent / "tokens"), "--data.tokenizer", "bytes"]


def tokenizer(path: Path) -> list[str]:
    text = path.parent / "text.txt"
    text.write_text("hello world " * 2000, encoding="utf-8")
    return ["tokenize", str(text), "--out", str(path.parent / "tokens"), "--data.tokenizer", str(path)]


def inspect(path: Path) -> list[str]:
    folder = path.parent / "step-00000001"
    folder.mkdir()
    path.rename(folder / "manifest.json")
    return ["status", str(folder)]


def secret(path: Path) -> list[str]:
    return ["doctor", "127.0.0.1:1", "--secret-file", str(path), "--timeout", "500ms"]


_LINE = b'{"text": "hello world, this is a line of text"}\n'
_PARQUET = b"PAR1" + bytes(64)
ATTACKS = [
    file("TOML: no TOML", b"= = =\n", settings, ".toml"),
    file("TOML: bytes that are no text", b"\xff\xfe\x00", settings, ".toml"),
    file("TOML: 3,000 levels deep", b"a = " + b"[" * 3000 + b"]" * 3000, settings, ".toml"),
    file("TOML: inline tables 500 deep", b"a = " + b"{a=" * 500 + b"1" + b"}" * 500, settings, ".toml"),
    file("TOML: an infinite number", b"[inner]\nlearning_rate = inf\n", settings, ".toml"),
    file("TOML: 1e400", b"[inner]\nlearning_rate = 1e400\n", settings, ".toml"),
    file("TOML: an integer of 10,000 digits", b"steps = " + b"9" * 10_000, settings, ".toml"),
    file("TOML: 2^70 steps", b"steps = 1180591620717411303424\n", settings, ".toml"),
    file("TOML: a key with escapes", b'"\\u001b[2J" = 1\n', settings, ".toml"),
    file("TOML: a value with escapes", b'algorithm = "\\u001b]0;owned\\u0007"\n', settings, ".toml", "escapes printed"),
    file("TOML: an unknown key of 60 kB", b"x" * 60_000 + b" = 1\n", settings, ".toml"),
    file("TOML: a key twice", b"steps = 1\nsteps = 2\n", settings, ".toml"),
    file("TOML: a list for a table", b"[[inner]]\nname = 1\n", settings, ".toml"),
    file("JSONL: no JSON", b"hello\n" * 1000, tokenize, ".jsonl"),
    file("JSONL: a line 3,000 levels deep", _LINE * 9 + b"[" * 3000 + b"]" * 3000 + b"\n", tokenize, ".jsonl"),
    file("JSONL: a line 200,000 levels deep", _LINE * 9 + b"[" * 200_000 + b"\n", tokenize, ".jsonl"),
    file("JSONL: an integer of 10,000 digits", _LINE + b'{"text": ' + b"9" * 10_000 + b"}\n", tokenize, ".jsonl"),
    file("JSONL: bytes that are no text", _LINE + b'{"text": "\xff\xfe"}\n', tokenize, ".jsonl"),
    file("JSONL: half of a pair of surrogates", _LINE + b'{"text": "\\ud800"}\n' + _LINE * 99, tokenize, ".jsonl"),
    file("JSONL: a text that is a number", _LINE + b'{"text": 1e400}\n', tokenize, ".jsonl"),
    file("JSONL: another field, with escapes", b'{"\\u001b[2J": "x"}\n' * 9, tokenize, ".jsonl"),
    file("JSONL: one line of 20 MB", b'{"text": "' + b"x" * 20_000_000 + b'"}\n', tokenize, ".jsonl"),
    file("JSONL: a NUL in each text", b'{"text": "a\\u0000b"}\n' * 999, tokenize, ".jsonl"),
    file("JSONL: nothing", b"", tokenize, ".jsonl"),
    file("parquet: garbage", b"PAR1" + os.urandom(5000) + b"PAR1", tokenize, ".parquet"),
    file("parquet: cut off", _PARQUET, tokenize, ".parquet"),
    file("parquet: a footer of 4 GB", _PARQUET + b"\xff\xff\xff\xff" + b"PAR1", tokenize, ".parquet"),
    file("parquet: a footer of -1 bytes", _PARQUET + struct.pack("<i", -1) + b"PAR1", tokenize, ".parquet"),
    file("parquet: nothing", b"", tokenize, ".parquet"),
    file("tokenizer: no JSON", b"{", tokenizer, ".json"),
    file("tokenizer: an empty object", b"{}", tokenizer, ".json"),
    file("tokenizer: a list", b"[]", tokenizer, ".json"),
    file("tokenizer: 3,000 levels deep", b'{"model": ' + b"[" * 3000 + b"]" * 3000 + b"}", tokenizer, ".json"),
    file("tokenizer: bytes that are no text", b"\xff\xfe", tokenizer, ".json"),
    file(
        "tokenizer: an unknown model with escapes",
        b'{"version": "1.0", "model": {"type": "\\u001b[2J"}}',
        tokenizer,
        ".json",
    ),
    file(
        "tokenizer: 2^62 as a number of a token",
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "model": {"type": "WordLevel", "vocab": {"a": 1 << 62}, "unk_token": "a"},
            }
        ).encode(),
        tokenizer,
        ".json",
    ),
    file(
        "tokenizer: -1 as a number of a token",
        json.dumps(
            {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}}
        ).encode(),
        tokenizer,
        ".json",
    ),
    file("checkpoint: no JSON", b"{", inspect, ".json"),
    file("checkpoint: a list", b"[]", inspect, ".json"),
    file("checkpoint: 3,000 levels deep", b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}", inspect, ".json"),
    file("checkpoint: 1e400", b'{"step": 1e400}', inspect, ".json"),
    file("checkpoint: bytes that are no text", b"\xff\xfe", inspect, ".json"),
    file("checkpoint: a file elsewhere", b'{"files": {"../../../etc/passwd": {"bytes": 1}}}', inspect, ".json"),
    file("secret: bytes that are no text", b"\xff\xfe" * 20, secret, ".secret"),
    file("secret: nothing", b"", secret, ".secret"),
    file("secret: 20 MB", b"x" * 20_000_000, secret, ".secret"),
]
