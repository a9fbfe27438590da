"""Training, evaluation, generation and exports begin a text as the tokenizer's own post-processor does, once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.cli import main
from diloco.data import ChatTokenizer, DataSettings, build_corpus, tokenize
from diloco.errors import DataError
from diloco.trained import load_trained
from tests.finetuning import TEMPLATE, asked, write_base, write_records
from tests.vocabularies import FAMILIES, around, byte_level, special

CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BEGINNING = ("Llama 2", "Gemma", "BERT")


def beginning(place: Path, template: str | None) -> Path:
    """Save a byte-level tokenizer that begins a text with <s>, as transformers does it."""
    from transformers import PreTrainedTokenizerFast

    library = PreTrainedTokenizerFast(
        tokenizer_object=around(byte_level(*special(*CONTROL)), "<s> $A"), bos_token="<s>", eos_token="</s>"
    )
    library.chat_template = template
    library.save_pretrained(place)
    return place


def heldout_bytes(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main([str(word) for word in words]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


@pytest.mark.parametrize("name", [*BEGINNING, "T5"])
def test_a_model_from_scratch_is_exported_with_the_tokenizer_that_it_was_trained_with(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    FAMILIES[name]().save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "text.jsonl"
    texts = [f"the quick brown fox {n}" * 9 for n in range(60)]
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    small = "--model.arguments {layers=1,width=16,ffn_width=16,heads=2} --sequence-length 16 --batch-size 2 --steps 2"
    flags = f"--tokenizer {tmp_path / 'tokenizer.json'} --data {text} --data-parallel-steps 0 {small}"
    assert main(["train", *flags.split(), "--out", str(tmp_path / "run"), "--data.heldout-fraction", "0.3"]) == 0
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "exported")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    ours = load_trained(tmp_path / "run").tokenizer
    document = ours.encode_documents(["the quick"]).tolist()
    ids = theirs("the quick")["input_ids"]
    assert ids in (document, document[:-1])
    if ours.begin_prompt:
        assert theirs.bos_token_id == ours.begin_prompt[0] == ids[0] != ids[1]
        config = json.loads((tmp_path / "exported" / "config.json").read_text())
        assert config["bos_token_id"] == ids[0]
    capsys.readouterr()
    settings = DataSettings(tokenizer=str(tmp_path / "tokenizer.json"), paths=(str(text),), heldout_fraction=0.3)
    heldout = build_corpus(settings).heldout
    assert heldout[0:1].tolist() == document[:1] or not ours.begin_prompt
    figures = heldout_bytes(capsys, "evaluate", tmp_path / "run", "--sequences", 0, "--json")
    windows = (len(heldout) - 1) // 16
    begin = 0 if ours.begin_prompt else int(heldout.byte_counts()[0])
    assert figures["bytes"] == heldout.num_bytes - begin - int(heldout.byte_counts()[1 + 16 * windows :].sum())
    assert figures["bytes"] > 0.9 * heldout.num_bytes


@pytest.mark.parametrize("template", [TEMPLATE, "{{ bos_token }}" + TEMPLATE, "<s>" + TEMPLATE])
def test_a_conversation_begins_once_whether_the_template_writes_it_or_not(template: str, tmp_path: Path) -> None:
    import transformers

    tokenizer = ChatTokenizer(str(beginning(tmp_path / "base", template)))
    messages = asked("q", "a")["messages"]
    prompt = tokenizer.prompt(messages[:1])
    begin = tokenizer.begin_prompt[0]
    assert prompt[0] == begin
    assert prompt.count(begin) == 1
    example, _ = tokenizer.conversation(messages)
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert example.byte_counts is not None
    assert example.byte_counts.sum() == len("userq\n\nassistanta\n\n")
    assert example.counted_bytes() == len("a\n")
    tokenizer.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    rendered = theirs.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert theirs(rendered, add_special_tokens=False)["input_ids"] == prompt
    assert ChatTokenizer(str(tmp_path / "saved")).prompt(messages[:1]) == prompt


def test_a_prompt_and_its_completion_begin_and_end_as_a_document(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(str(beginning(tmp_path / "base", None)))
    example = tokenizer.completion("né", " wé")
    assert example.tokens.tolist() == tokenizer.encode_documents(["né wé"]).tolist()
    assert example.tokens[: 1 + 3].tolist() == tokenizer.encode_prompt("né")
    assert example.counted.tolist() == [False] * 4 + [True] * 5
    assert example.counted_bytes() == len(" wé".encode())


def test_a_chat_model_is_evaluated_by_the_bytes_of_its_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "base")
    beginning(base, TEMPLATE)
    data = write_records(tmp_path / "chat.jsonl", [asked(f"{n}?", "é" * (1 + n % 3)) for n in range(60)])
    flags = f"--data {data} --lora-rank 2 --steps 2 --sequence-length 64 --batch-size 2 --out {tmp_path / 'run'}"
    assert main(["finetune", str(base), *flags.split()]) == 0
    capsys.readouterr()
    figures = heldout_bytes(capsys, "evaluate", tmp_path / "run", "--data", data, "--sequences", 0, "--json")
    answers = sum(len("é".encode()) * (1 + n % 3) for n in range(60))
    assert figures["bytes"] == answers + 60 * len("\n")


def test_tokens_made_with_other_beginnings_are_refused(tmp_path: Path) -> None:
    texts = tmp_path / "text.jsonl"
    texts.write_text("".join(json.dumps({"text": f"the {n}"}) + "\n" for n in range(60)))
    for name, single in (("with", "<s> $A"), ("without", "$A")):
        (tmp_path / name).mkdir()
        around(byte_level(*special("<s>", "</s>")), single).save(str(tmp_path / name / "tokenizer.json"))
    settings = DataSettings(tokenizer=str(tmp_path / "with"), paths=(str(texts),), heldout_fraction=0.3)
    folder = tokenize(settings, tmp_path / "tokens")
    begin, end = 256, 257
    tokens = folder.splits["train"][:]
    assert (tokens[0], tokens[-1]) == (begin, end)
    assert np.count_nonzero(tokens == begin) == np.count_nonzero(tokens == end) == folder.splits["train"].documents
    (tmp_path / "tokens" / "tokenizer.json").write_bytes((tmp_path / "without" / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match=r"has begin_document = \[256\] and the tokenizer.json in it has"):
        folder.tokenizer()
    manifest = tmp_path / "tokens" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 3', '"format_version": 2'))
    with pytest.raises(DataError, match=r"version 2, but diloco .* make it again with `diloco tokenize`"):
        build_corpus(DataSettings(paths=(str(tmp_path / "tokens"),)))
