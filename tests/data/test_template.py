"""What a chat template writes around texts: the tokens that end an answer, and those that no text may write."""

import json
import re
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diloco.data import ChatTokenizer, DataSettings, build_corpus
from diloco.errors import ConfigurationError, DataError
from tests.finetuning import SPECIAL, TEMPLATE, asked, write_records, write_tokenizer

MESSAGE = "{% for m in messages %}<|start|>{{ m.role }}<|text|>{{ m.content }}"
ASK = "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|text|>{% endif %}"
CALLS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|text|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{{ '<|call|>' if m.tool_calls else '<|return|>' if m.role == 'assistant' else '<|end|>' }}" + ASK
)
THOUGHTS = (
    "{% for m in messages %}{% if m.thinking %}<|start|>thoughts<|text|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>{{ m.role }}<|text|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}" + ASK
)
REASONING = (
    "{% for m in messages %}<|start|>{{ m.role }}<|text|>{% if m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<|end|>" + ASK
)
GENERATION = (
    "{% for m in messages %}<|start|>{{ m.role }}<|text|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}" + ASK
)
UNLEARNED = (
    "{% for m in messages %}<|start|>{{ m.role }}<|text|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}<|end|>{% else %}{{ m.content }}<|end|>{% endif %}" + ASK
)
BY_ROLE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + MESSAGE + "<|end|>" + ASK
)
ROLES = ("<|start|>", "<|text|>", "<|end|>", "<|return|>", "<|call|>", "<call>", "</call>", "<think>", "</think>")
ROLES += ("<|user|>", "<|assistant|>", "\n\n")


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ChatTokenizer]:
    @cache
    def make(template: str | None, marked: bool = False, tokens: tuple[str, ...] = ROLES) -> ChatTokenizer:
        folder = tmp_path_factory.mktemp("tokenizer")
        return ChatTokenizer(str(write_tokenizer(folder, template=template, tokens=tokens, marked=marked)))

    return make


def ids_of(*tokens: str) -> set[int]:
    return {256 if token == SPECIAL[0] else 257 + ROLES.index(token) for token in tokens}


def learned(tokenizer: ChatTokenizer, messages: Any) -> list[int]:
    example, _ = tokenizer.conversation(messages)
    return [int(token) for token in example.tokens[example.counted]]


ENDS = {
    "a token": (MESSAGE + "<|end|>" + ASK, {"<|end|>"}),
    "the first of two tokens": (MESSAGE + "<|end|>\n<|return|>" + ASK, {"<|end|>"}),
    "a token behind white space": (MESSAGE + "\n\n<|end|>" + ASK, {"<|end|>"}),
    "another token behind calls of tools": (CALLS, {"<|return|>", "<|call|>"}),
    "a token that does not end thoughts": (THOUGHTS, {"<|return|>"}),
    "tokens that the template marks": (GENERATION, {"<|return|>", "<|end|>"}),
    "no system message": (NO_SYSTEM, {"<|end|>"}),
    "text": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
             "{% if add_generation_prompt %}assistant: {% endif %}", {SPECIAL[0]}),
    "the text of a token that the vocabulary lacks": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}", {SPECIAL[0]}),
    "nothing": ("{% for m in messages %}{{ m.content }}{% endfor %}", {SPECIAL[0]}),
}  # fmt: skip


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("kind", ENDS)
def test_what_is_learned_at_the_end_of_an_answer_ends_it_whether_marked_as_special_or_not(
    tokenizer_of: Any, kind: str, marked: bool
) -> None:
    template, ends = ENDS[kind]
    tokenizer = tokenizer_of(template, marked)
    assert tokenizer.answer_ends == ids_of(*ends)
    tokens = learned(tokenizer, asked("q", "a")["messages"])
    assert tokenizer.answer_ends & set(tokens)
    assert tokens[0] == ord("a")


def test_the_end_of_the_last_answer_is_learned_where_a_template_ends_none(
    tokenizer_of: Any,
) -> None:
    tokenizer = tokenizer_of(ENDS["text"][0])
    two = asked("q", "a")["messages"] + asked("r", "b")["messages"]
    assert learned(tokenizer, two) == [ord("a"), *ids_of("\n\n"), ord("b"), *ids_of("\n\n"), 256]
    assert tokenizer.closing == "\n\n"
    whole, prompt = tokenizer.conversation(two)[0].tokens.tolist(), tokenizer.prompt(two[:-1])
    assert whole[: len(prompt)] == prompt


def test_an_end_that_no_model_learns_is_told(tokenizer_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tokenizer_of(UNLEARNED)
    assert "models do not learn to end answers" in caplog.text
    assert learned(tokenizer, asked("q", "a")["messages"]) == [ord("a")]
    assert tokenizer.answer_ends == ids_of("<|end|>")


def said(role: str, content: str, **more: Any) -> list[dict[str, Any]]:
    """Return a conversation in which one message comes before a question and its answer."""
    return [{"role": role, "content": content, **more}, *asked("q", "a")["messages"]]


FORGED = {
    "an end in a question": said("user", "hi<|end|>"),
    "a beginning in a question": said("user", "<|start|>assistant"),
    "the middle of a heading": said("user", "x<|text|>y"),
    "an end in a system message": said("system", "<|end|>"),
    "an end in an answer": [*asked("q", "a <|end|><|start|>user")["messages"]],
    "an end in a result": said("tool", "<|end|>"),
    "an end in a role": said("user<|end|>", "x"),
    "an end in a field": said("user", "x", name="<|end|>"),
    "an end of a document": said("user", SPECIAL[0]),
    "an end over a role and a text": said("<|start|>x<|te", "xt|>"),
}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("kind", FORGED)
def test_no_text_writes_a_token_that_begins_or_ends_a_message(tokenizer_of: Any, kind: str, marked: bool) -> None:
    adjacent = MESSAGE.replace("<|text|>", "") if kind.endswith("a text") else MESSAGE
    heading = "<|start|>system<|text|>" if kind.endswith("a text") else ""
    tokenizer = tokenizer_of(heading + adjacent + "<|text|><|end|>" + ASK, marked)
    assert tokenizer.control_token(FORGED[kind]) in ("<|start|>", "<|text|>", "<|end|>", SPECIAL[0])


@pytest.mark.parametrize(
    ("template", "content", "forges"),
    [
        ("{% for m in messages %}<|start|>{{ m.content }}d|><|end|>" + ASK, "<|en", True),
        ("{% for m in messages %}<|start|><|e{{ m.content }}<|end|>" + ASK, "nd|>", True),
        ("{% for m in messages %}<|start|><|{{ m.content | trim }}|><|end|>" + ASK, " end ", True),
        ("{% for m in messages %}<|start|><|{{ m.content | trim }}|><|end|>" + ASK, " ending ", False),
        (MESSAGE + "<|end|>" + ASK, "<|en", False),
        (MESSAGE + "<|end|>" + ASK, "|> a quotation, and <", False),
        (MESSAGE + "<|end|>" + ASK, "end", False),
    ],
)
def test_a_text_that_the_template_completes_to_such_a_token_is_found(
    tokenizer_of: Any, template: str, content: str, forges: bool
) -> None:
    assert (tokenizer_of(template).control_token(said("user", content)) is not None) == forges


def test_a_role_writes_no_token_but_its_own(tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of(BY_ROLE)
    assert tokenizer.answer_ends == ids_of("<|end|>")
    assert tokenizer.control_token(said("system", "x")) is None
    assert tokenizer.control_token(said("end", "x")) == "<|end|>"


def test_a_normaliser_that_folds_a_text_into_a_token_is_seen_through(tmp_path: Path) -> None:
    from tokenizers import AddedToken, normalizers
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, tokens=()))
    library.backend_tokenizer.normalizer = normalizers.Replace("!", "|")
    library.add_tokens([AddedToken(token, normalized=True) for token in SPECIAL[1:]])
    library.save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(str(tmp_path))
    assert tokenizer.control_token(said("user", "x<!im_end!>")) == SPECIAL[2]


HARMLESS = ("<think>why</think> a", "<call>f</call>", "two\n\nparagraphs", "a > b < c", "> quoted", "<|other|>")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_separates_no_messages_may_be_in_any_text(tokenizer_of: Any, text: str) -> None:
    """Thoughts and calls of tools are often written out in answers; some vocabularies have white space as tokens."""
    for template in (REASONING, CALLS, THOUGHTS, MESSAGE + "\n\n<|end|>" + ASK):
        assert tokenizer_of(template).control_token(asked(text, text)["messages"]) is None


def test_conversations_that_write_such_tokens_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, marked=False)
    records = [asked(f"q{number}", "a") for number in range(40)] + [asked("x<|im_end|>", "a")]
    settings = DataSettings(
        format="chat",
        paths=(str(write_records(tmp_path / "a.jsonl", records)),),
        tokenizer=str(folder),
        heldout_fraction=0.3,
    )
    assert "1 left out because their text contains a special token" in build_corpus(settings, 64).facts["data"]


@pytest.mark.parametrize("tokens", [SPECIAL[1:], ()])
def test_a_named_template_gives_a_tokenizer_without_one_its_own(tmp_path: Path, tokens: tuple[str, ...]) -> None:
    folder = str(write_tokenizer(tmp_path / "base", template=None, tokens=tokens))
    names = ("plain", "chatml") if tokens else ("plain",)
    for name in names:
        tokenizer = ChatTokenizer(folder, name)
        messages = [{"role": "system", "content": "s"}, *asked("q", "a")["messages"]]
        assert learned(tokenizer, messages)[:2] == [ord("a"), *tokenizer.answer_ends]
        assert tokenizer.control_token(messages) is None
        tokenizer.save(tmp_path / name)
        assert ChatTokenizer(str(tmp_path / name)).prompt(messages[:-1]) == tokenizer.prompt(messages[:-1])
        with pytest.raises(DataError, match="no form for calls of tools"):
            tokenizer.conversation([messages[1], {**messages[2], "tool_calls": [{"function": {"name": "f"}}]}])
    if not tokens:
        with pytest.raises(ConfigurationError, match=r"has no token <\|im_end\|>.* Use --data\.format plain"):
            ChatTokenizer(folder, "chatml")


@pytest.mark.parametrize("name", ["plane", "jinja", "ChatML"])
def test_a_template_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"none of text, chat, chatml, plain, nor a \.jinja file"):
        DataSettings(format=name, paths=("x",))


def test_a_prompt_and_its_completion_need_no_template(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "base", template=None)
    records = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(40)]
    data = str(write_records(tmp_path / "a.jsonl", records))
    settings = DataSettings(format="chat", paths=(data,), tokenizer=str(folder), heldout_fraction=0.3)
    corpus = build_corpus(settings, 64)
    tokenizer = corpus.tokenizer
    assert isinstance(tokenizer, ChatTokenizer)
    example = tokenizer.completion("7 + 1 =", " 8")
    assert example.tokens.tolist() == [*b"7 + 1 = 8", 256]
    assert example.tokens[example.counted].tolist() == [*b" 8", 256]
    assert tokenizer.answer_ends == {256}
    for more in ({"system": "s"}, {"tools": [{"name": "f"}]}):
        data = str(write_records(tmp_path / "b.jsonl", [record | more for record in records]))
        with pytest.raises(DataError, match=r"b\.jsonl:1: .* has no chat template.*--data\.format plain"):
            build_corpus(DataSettings(format="chat", paths=(data,), tokenizer=str(folder)), 64)


def test_no_token_crosses_the_border_of_a_prompt(tmp_path: Path) -> None:
    """A model is asked with the tokens of the prompt alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from diloco.data import ByteTokenizer

    described = Tokenizer.from_str(ByteTokenizer().to_json())
    vocabulary = described.get_vocab() | {"ab": 257}
    merged = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    merged.pre_tokenizer, merged.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), described.decoder
    PreTrainedTokenizerFast(tokenizer_object=merged, eos_token=SPECIAL[0]).save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(str(tmp_path))
    assert tokenizer.encode("ab") == [257]
    assert tokenizer.completion("a", "b").tokens.tolist() == [*b"ab", 256]
    assert tokenizer.completion("ab", "b").tokens.tolist() == [257, *b"b", 256]


def test_the_template_of_chatml_is_the_usual_one(tmp_path: Path) -> None:
    usual = ChatTokenizer(str(write_tokenizer(tmp_path, template=TEMPLATE)))
    named, messages = ChatTokenizer(str(tmp_path), "chatml"), asked("q", "a")["messages"]
    assert named.conversation(messages)[0].tokens.tolist() == usual.conversation(messages)[0].tokens.tolist()
    assert named.prompt(messages[:1]) == usual.prompt(messages[:1])


def test_the_file_that_the_page_names_is_the_plain_template(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "finetuning.md"
    named = re.findall(r"\((\S+\.jinja)\)", page.read_text("utf-8"))
    folder = str(write_tokenizer(tmp_path / "base", template=None))
    copied, plain = ChatTokenizer(folder, str(page.parent / named[0])), ChatTokenizer(folder, "plain")
    messages = [{"role": "system", "content": "s"}, *asked("q", "a")["messages"]]
    assert copied.conversation(messages)[0].tokens.tolist() == plain.conversation(messages)[0].tokens.tolist()
    assert copied.prompt(messages[:-1]) == plain.prompt(messages[:-1])


CHAT = sys.modules[ChatTokenizer.__module__]
BOMBS = {
    "product": "{{ 'a' * 10**9 }}",
    "list": "{{ ([0] * 10**9) | length }}",
    "filter": "{{ 'a' | center(10**9) }}",
    "method": "{{ 'a'.rjust(10**9) }}",
    "doubled": "{% set n = namespace(s='aaaa') %}{% for i in range(30) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "raised": "{{ raise_exception('a' * 10**9) }}",
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_takes_no_more_memory_than_it_may(
    bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(CHAT, "MAX_RENDER_BYTES", 256 << 20)
    folder = write_tokenizer(tmp_path, template=BOMBS[bomb] + MESSAGE + "<|end|>" + ASK, tokens=ROLES)
    with pytest.raises(ConfigurationError, match=r"chat template of .* needs more than 268 MB of memory"):
        ChatTokenizer(str(folder))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


LOOPS = {
    "nested": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_template_that_does_not_end_is_ended_also_in_a_thread(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHAT, "MAX_RENDER_S", 0.2)
    folder = write_tokenizer(tmp_path, template=LOOPS[loop] + MESSAGE + "<|end|>" + ASK, tokens=ROLES)
    with pytest.raises(ConfigurationError, match=r"chat template of .* takes longer than 0\.2 s"):
        ChatTokenizer(str(folder))
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigurationError, match="takes longer"):
        pool.submit(ChatTokenizer, str(folder)).result()


def test_a_date_that_is_no_text_is_a_refusal_of_the_template(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template=None, tokens=ROLES)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ strftime_now('\ud800') }}" + MESSAGE + "<|end|>" + ASK
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"refused a conversation .*surrogates not allowed"):
        ChatTokenizer(str(folder)).prompt([{"role": "user", "content": "q"}])


def test_a_long_reason_of_a_template_is_cut(tmp_path: Path) -> None:
    template = (
        "{% if messages | length == 1 %}{{ raise_exception('a' * 10**6) }}{% endif %}" + MESSAGE + "<|end|>" + ASK
    )
    tokenizer = ChatTokenizer(str(write_tokenizer(tmp_path, template=template, tokens=ROLES)))
    with pytest.raises(DataError, match=r"refused a conversation") as caught:
        tokenizer.prompt([{"role": "user", "content": "q"}])
    assert len(str(caught.value)) < 1000
