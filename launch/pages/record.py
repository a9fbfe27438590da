"""Record three peers that fine-tune one model over links of 20 Mbit/s; one is killed and comes back.

    python launch/pages/record.py run     # root, iproute2, diloco[finetune,swarm]; writes swarm.cast beside this file
    python launch/pages/record.py draw    # draws docs/pictures/swarm.svg from swarm.cast

The cast is asciinema's, version 2, with real times. It has all that alice prints, and of bob and carol what they say
about the others. The drawing shows every fifth row of progress, and no pause is longer than 2 s.
"""

import contextlib
import html
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

CAST = Path(__file__).with_name("swarm.cast")
PICTURE = Path(__file__).parents[2] / "docs/pictures/swarm.svg"
WIDTH, HEIGHT = 112, 26  # characters
LONGEST_PAUSE_S = 2.0
COLOURS = {"alice": "#7ee787", "bob": "#76e3ea", "carol": "#d2a8ff"}
PROGRESS = re.compile(r" *\d+/\d+ +\d")
ABOUT_OTHERS = re.compile(r"joined|is gone|continue|rejoin|fetch")
HELLO = ("", "Hi! ", "Please tell me: ", "Next: ", "Do you know this? ", "Well, ", "A question: ", "And ")
ANSWERS = {
    "alice": {
        "What do replicas send?": "How far each of them has moved, at four bits per value.",
        "How often do they send it?": "Every few steps, one fragment of the model at a time.",
        "How do I join?": "Paste the line that a peer prints.",
    },
    "bob": {
        "What if somebody is killed?": "The others go on without it.",
        "What is a view?": "The list of replicas that take part.",
        "What is a void round?": "One that no replica applies.",
    },
    "carol": {
        "Who is in charge?": "Nobody. All replicas vote on each round.",
        "Do all of us hold the same model?": "Yes, bit for bit, after every round.",
        "Does my text leave my machine?": "No, only pseudo-gradients do.",
    },
}
"""What each peer has, and nobody else."""


class Cast:
    """The lines of a terminal, with the times at which they came."""

    def __init__(self) -> None:
        self._began_s, self._lock = time.monotonic(), threading.Lock()
        self.events: list[tuple[float, str]] = []

    def add(self, peer: str, line: str) -> None:
        with self._lock:
            self.events.append((round(time.monotonic() - self._began_s, 3), f"{peer:>5} {line}\r\n"))
            print(self.events[-1][1], end="", flush=True)

    def save(self) -> None:
        header = {"version": 2, "width": WIDTH, "height": HEIGHT, "title": "diloco: three peers, 20 Mbit/s"}
        lines = [header, *([at_s, "o", text] for at_s, text in self.events)]
        CAST.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def sh(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def network() -> Iterator[dict[str, str]]:
    """A namespace for each peer, which sends and receives 20 Mbit/s."""
    hub = f"rec{os.getpid()}"
    names = {peer: f"{hub}-{peer}" for peer in ANSWERS}
    try:
        for name in (hub, *names.values()):
            sh(f"ip netns add {name}")
            sh(f"ip -n {name} link set lo up")
        sh(f"ip -n {hub} link add br0 type bridge")
        sh(f"ip -n {hub} link set br0 up")
        for number, (peer, name) in enumerate(names.items(), 1):
            sh(f"ip link add wan netns {name} type veth peer name {peer} netns {hub}")
            sh(f"ip -n {hub} link set {peer} master br0 up")
            sh(f"ip -n {name} addr add 45.33.32.{number}/24 dev wan")
            sh(f"ip -n {name} link set wan up")
            for place, device in ((name, "wan"), (hub, peer)):
                sh(f"ip netns exec {place} tc qdisc add dev {device} root tbf rate 20mbit burst 64kb latency 300ms")
        yield names
    finally:
        for name in (*names.values(), hub):
            for pid in sh(f"ip netns pids {name}").split():
                os.kill(int(pid), signal.SIGKILL)
            sh(f"ip netns del {name}")


class Command:
    """A command that a peer types; what it prints goes to the cast."""

    def __init__(self, namespace: str, cast: Cast, peer: str, command: str, folder: Path) -> None:
        cast.add(peer, f"$ {command}")
        self._cast, self._peer = cast, peer
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, "bash", "-c", f"exec {command}"],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "COLUMNS": str(WIDTH - 8)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line.rstrip())
            if self._peer == "alice" or (ABOUT_OTHERS.search(line) and "waiting" not in line):
                self._cast.add(self._peer, f"| {line.rstrip()}")

    def await_line(self, pattern: str) -> str:
        """Return the first line that has the pattern."""
        while True:
            for line in list(self._lines):
                if re.search(pattern, line):
                    return line
            if not self._reader.is_alive():
                sys.exit(f"{self._peer} has ended without {pattern!r}:\n" + "\n".join(self._lines[-20:]))
            time.sleep(0.1)

    def end(self) -> None:
        self._reader.join()
        self.process.wait()


def write_inputs(folder: Path, peer: str) -> None:
    """Write the configuration of a small model, its tokenizer, and the conversations that only this peer has."""
    from transformers import LlamaConfig

    from benchmarks.finetune.task import write_tokenizer

    every = [pair for pairs in ANSWERS.values() for pair in pairs.items()]
    texts = [f" user: {hello}{asked} assistant: {answer}" for hello in HELLO for asked, answer in every]
    size = write_tokenizer(folder / "llama", texts * 20)
    LlamaConfig(
        vocab_size=size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        eos_token_id=0,
        bos_token_id=0,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder / "llama")
    with (folder / "chat.jsonl").open("w", encoding="utf-8") as file:
        for hello in HELLO:
            for asked, answer in ANSWERS[peer].items():
                file.write(json.dumps({"prompt": hello + asked, "completion": answer}) + "\n")


def record(steps: int) -> None:
    cast = Cast()
    with tempfile.TemporaryDirectory() as home, network() as names:
        folders = {peer: Path(home) / peer for peer in ANSWERS}
        for peer, folder in folders.items():
            folder.mkdir()
            write_inputs(folder, peer)

        def typed(peer: str, command: str) -> Command:
            return Command(names[peer], cast, peer, command, folders[peer])

        settings = f"--steps {steps} --lora-rank 0 --batch-size 8 --sequence-length 64 --learning-rate 1e-3 --log plain"
        first = f"diloco finetune llama --data chat.jsonl --data.local --transport swarm --run friends {settings}"
        alice = typed("alice", f"{first} --replicas 3 --name alice --out mine")
        address = re.findall(r"/ip4/\S+", alice.await_line(r"--join /ip4/45"))[-1]
        join = f"{first} --replicas 3 --join {address}"
        bob = typed("bob", f"{join} --name bob")
        carol = typed("carol", f"{join} --name carol")
        carol.await_line(PROGRESS.pattern)
        time.sleep(8)
        cast.add("carol", "$ kill -9 %1")
        carol.process.send_signal(signal.SIGKILL)
        carol.end()
        alice.await_line("is gone")
        time.sleep(5)
        carol = typed("carol", f"{join} --name carol")
        for command in (carol, bob, alice):
            command.end()
        for question in ("Who is in charge?", "What if somebody is killed?"):  # of carol's and of bob's conversations
            typed("alice", f"diloco generate mine --chat --prompt '{question}'").end()
    cast.save()


def shown() -> Iterator[tuple[float, str, str]]:
    """Yield time, peer and text of each line that the drawing shows."""
    at_s = before_s = 0.0
    rows = 0
    for event in CAST.read_text(encoding="utf-8").splitlines()[1:]:
        recorded_s, _, line = json.loads(event)
        peer, text = line[:5].strip(), line[6:].rstrip()
        rows += bool(PROGRESS.match(text[2:]))
        if PROGRESS.match(text[2:]) and rows % 5:
            continue
        at_s += min(LONGEST_PAUSE_S, recorded_s - before_s)
        before_s = recorded_s
        indent = " " * (2 + len(text[2:]) - len(text[2:].lstrip()))
        for piece in textwrap.wrap(text, WIDTH - 6, subsequent_indent=indent, break_on_hyphens=False):
            yield at_s, peer, piece


def draw() -> None:
    """Draw the cast as an SVG that scrolls: at each time the newest line is the lowest one."""
    lines, row = list(shown()), 17
    end_s = lines[-1][0] + 6
    keys, texts = [], []
    for number, (at_s, peer, text) in enumerate(lines):
        keys.append(f"{100 * at_s / end_s:.2f}%{{transform:translateY({(HEIGHT - 1 - number) * row}px)}}")
        bold = ' font-weight="bold"' if text.startswith("$") else ""
        texts.append(
            f'<text y="{14 + row * number}"><tspan fill="{COLOURS[peer]}">{peer:>5}</tspan>'
            f"<tspan{bold}> {html.escape(text)}</tspan></text>"
        )
    width, height = WIDTH * 8 + 24, HEIGHT * row + 20
    PICTURE.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<style>@keyframes scroll{{{''.join(keys)}100%{{transform:translateY({(HEIGHT - len(lines)) * row}px)}}}}\n"
        f"#lines{{animation:scroll {end_s:.1f}s step-end infinite}}"
        "text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#e6edf3;white-space:pre}</style>\n"
        f'<rect width="{width}" height="{height}" rx="6" fill="#0d1117"/>\n'
        f'<svg x="12" y="10" width="{width - 24}" height="{HEIGHT * row}"><g id="lines">\n'
        + "\n".join(texts)
        + "\n</g></svg></svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if sys.argv[1:] == ["run"]:
        record(steps=1500)
    elif sys.argv[1:] != ["draw"]:
        sys.exit(__doc__)
    draw()
