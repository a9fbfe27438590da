"""Exports in the hands of others: lm-eval, and llama.cpp's converter for vocabularies trained here."""

import functools
import importlib.metadata
import json
import shutil
from pathlib import Path

from benchmarks.real.gguf_files import gguf_facts, llama_cpp
from benchmarks.real.running import Diloco, WrongError, run
from benchmarks.real.texts import SMALL, play
from benchmarks.real.trying import Tries

TASK = """task: play
dataset_path: json
dataset_kwargs: {{data_files: {{test: {texts}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: bits_per_byte}}
"""


# docs/after-training.md, and where the script lies
CONVERT = """import sys
sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf, conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda *_: 'gpt-2'
convert_hf_to_gguf.main()"""


def lm_eval(diloco: Diloco, runs: Path, export: Path) -> str:
    """Measure bits per byte of an export with lm-eval, and with `diloco evaluate` on the same texts."""
    parts = [part for part in play(runs.parents[1]).read_text("utf-8", "replace").split("\n\n") if len(part) > 40][-40:]
    texts = runs / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts), "utf-8")
    tasks = runs / "tasks"
    tasks.mkdir(exist_ok=True)
    (tasks / "play.yaml").write_text(TASK.format(texts=texts))
    words = (
        f"-m lm_eval run --model hf --model_args pretrained={export},max_length=64 --tasks play --include_path {tasks}"
    )
    output = runs / f"measured-{export.name}"
    run([[*words.split(), "--device", "cpu", "--batch_size", "1", "--output_path", str(output)]], runs)
    results = json.loads(next(output.rglob("*.json")).read_text())["results"]
    measured = results["play"]["bits_per_byte,none"]
    printed = diloco(f"evaluate {export} --data {texts} --json --device cpu --context 64")
    ours = json.loads(printed[printed.index("{") :])["bits_per_byte"]
    if abs(measured / ours - 1) > 0.05:
        raise WrongError(f"lm-eval says {measured:.3f} bits per byte, diloco evaluate {ours:.3f}")
    return f"{measured:.3f} bits per byte, {ours:.3f} by diloco evaluate, which divides texts at other places"


def try_all(tries: Tries, work: Path, only: list[str], converter: Path | None) -> None:
    """Train with a vocabulary of the text's own and with one of bytes, export, and hand the exports on."""
    runs = work / "runs/exports"
    shutil.rmtree(runs, ignore_errors=True)
    tries.hidden |= {str(runs) + "/": "", str(work) + "/": ""}
    with Diloco(runs) as diloco:
        for vocabulary in ("bpe", "bytes"):
            export = runs / f"{vocabulary}-exported"

            def make(vocabulary: str = vocabulary, export: Path = export) -> str:
                line = f"train --data {play(work)} {SMALL} --steps 10 --out {runs}/{vocabulary}"
                diloco(line + (" --tokenizer bpe:1024" if vocabulary == "bpe" else ""))
                diloco(f"export {runs}/{vocabulary} --out {export}")
                return "exported"

            if not tries(f"{vocabulary}: train, export", "shakespeare 0.6", diloco.said, make):
                continue
            if not only or "lm-eval" in only:
                thing = f"lm-eval {importlib.metadata.version('lm-eval')}"
                measure = functools.partial(lm_eval, diloco, runs, export)
                tries(f"{vocabulary}: lm-eval", thing, "lm_eval run --model hf ...", measure)
            if converter is not None:
                target = runs / f"{vocabulary}.gguf"

                def convert(export: Path = export, target: Path = target) -> str:
                    run([["-c", CONVERT, str(converter.parent), str(export), "--outfile", str(target)]], runs)
                    return gguf_facts(target, export)

                line = f"the page's lines around convert_hf_to_gguf.py {export.name}"
                tries(f"{vocabulary}: GGUF", llama_cpp(converter), line, convert)
