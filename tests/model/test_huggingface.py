"""Models of ``transformers`` behind the training interface: the same numbers, and what is refused."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.algorithm import partition
from diloco.errors import CheckpointError, ConfigurationError
from diloco.model import ForeignModel, HuggingFaceModel, ModelSettings, build_language_model
from diloco.train import prepare_blocks
from diloco.transport import ReplicaGroup
from tests.huggingface import ARCHITECTURES, GROUPED, NO_SPECIAL, WIDTHS, config_of, write_config

PAD = 7
EXACT = {"atol": 2e-6, "rtol": 2e-5}
"""Compare up to the round-off of float32 at these sizes."""


def built(folder: Path, seed: int = 0, device: str = "cpu", **settings: Any) -> HuggingFaceModel:
    """Build it with ``settings`` as ``model.arguments``."""
    model = build_language_model(ModelSettings(source=f"hf:{folder}", arguments=settings), seed=seed, device=device)
    assert isinstance(model, HuggingFaceModel)
    return model


def batch(rows: int = 2, length: int = 13, seed: int = 0) -> Tensor:
    return torch.randint(3, 272, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceModel:
    return built(write_config(tmp_path_factory.mktemp("config"), request.param)).eval()


def test_the_loss_is_that_of_transformers(model: HuggingFaceModel) -> None:
    """With experts, the load-balancing loss is included, but not in the cross-entropy."""
    tokens = batch()
    wrapped = copy.deepcopy(model.wrapped).train()
    theirs = wrapped(input_ids=tokens, labels=tokens, **({"output_router_logits": True} if model.balance_loss else {}))
    model.train()
    loss, cross_entropy = model.loss(tokens[:, :-1], tokens[:, 1:])
    model.eval()
    is_routed = "moe" in type(wrapped).__name__.lower() or "mixtral" in type(wrapped).__name__.lower()
    assert (model.balance_loss > 0) == is_routed
    if is_routed:  # their loss also covers the last token, which predicts nothing
        assert 0 < float(loss.detach() - cross_entropy) < 4 * model.balance_loss
        balance = float(theirs.aux_loss.detach()) * model.balance_loss
        torch.testing.assert_close(float(theirs.loss.detach()), float(cross_entropy) + balance, rtol=1e-5, atol=1e-5)
    elif model.wrapped.config.model_type not in ("gpt2", "opt"):  # these have dropout
        torch.testing.assert_close(loss, theirs.loss, **EXACT)
        assert float(loss.detach()) == float(cross_entropy)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's at graph breaks
def test_the_loss_in_chunks_is_the_loss_where_nothing_but_a_product_makes_the_logits(model: HuggingFaceModel) -> None:
    """Gemma 2 caps its logits, and experts have a load-balancing loss. Recomputing blocks changes no bit."""
    assert (model.projection is not None) == (model.wrapped.config.model_type not in ("gemma2",))
    tokens = batch()
    found = []
    routed = model.wrapped.config.model_type == "mixtral"  # its blocks are traced with breaks
    variants: list[tuple[int, Any]] = [(0, "none"), (5, "none"), (0, "full"), (0, "selective")]
    for chunks, checkpointing in variants:
        some = copy.deepcopy(model)
        some.loss_chunk_tokens = chunks
        prepare_blocks(some, checkpointing=checkpointing, compiled=routed and chunks > 0, backend="eager")
        loss, cross_entropy = some.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        gradients = [parameter.grad for parameter in some.parameters() if parameter.grad is not None]
        assert len(gradients) == len(list(some.parameters()))
        found.append((loss.detach(), cross_entropy, gradients))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], **EXACT)
    assert all(torch.equal(one, other) for one, other in zip(found[0][2], found[2][2], strict=True))


@torch.no_grad()
def test_the_loss_in_chunks_leaves_out_no_layer_before_the_head(tmp_path: Path) -> None:
    """ModernBERT's projection has a dense layer and a norm before it, and may have no bias."""
    special = NO_SPECIAL | {"pad_token_id": 0, "cls_token_id": 0, "sep_token_id": 0}
    some = built(write_config(tmp_path, "modernbert-decoder", **WIDTHS, **special, decoder_bias=False)).eval()
    tokens = batch()
    whole = some.loss(tokens[:, :-1], tokens[:, 1:])
    some.loss_chunk_tokens = 5
    torch.testing.assert_close(some.loss(tokens[:, :-1], tokens[:, 1:]), whole, **EXACT)


@torch.no_grad()
def test_documents_of_a_row_see_nothing_of_each_other(model: HuggingFaceModel) -> None:
    """Also with two documents of one token, and different documents in each row."""
    tokens = batch()
    documents = torch.tensor([[0] * 5 + [1] + [2] + [3] * 6, [4] * 2 + [5] * 11])
    together = model(tokens, documents=documents)
    for row, lengths in enumerate(([5, 1, 1, 6], [2, 11])):
        alone = [model(piece) for piece in tokens[row : row + 1].split(lengths, 1)]
        torch.testing.assert_close(together[row : row + 1], torch.cat(alone, 1), **EXACT)


@torch.no_grad()
def test_rows_of_documents_have_a_loss(model: HuggingFaceModel) -> None:
    """Regression: the load-balancing loss of experts failed on the mask of the documents."""
    tokens, documents = batch(length=14), torch.tensor([[0] * 5 + [1] * 8, [2] * 13])
    loss, cross_entropy = model.loss(tokens[:, :-1], tokens[:, 1:], documents)
    logits = model(tokens[:, :-1], documents=documents)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(cross_entropy, expected, **EXACT)
    assert (float(loss) > float(cross_entropy)) == (model.balance_loss > 0)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:_compile flag")
def test_every_attention_masks_documents(
    windowed: bool, implementation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models whose layers see everything or a window; FlexAttention gets blocks, and no dense mask."""
    monkeypatch.setattr("torch.compile", lambda function, **_: function)  # transformers compiles FlexAttention
    place = (
        write_config(tmp_path, "mistral", **GROUPED, sliding_window=6) if windowed else write_config(tmp_path, "Llama")
    )
    some = built(place, attn_implementation=implementation).eval()
    assert some.wrapped.config._attn_implementation == implementation
    tokens, documents = batch(length=24), torch.tensor([[0] * 10 + [1] * 14, [2] * 24])
    together = some(tokens, documents=documents)
    alone = torch.cat([some(piece) for piece in tokens[:1].split([10, 14], 1)], 1)
    torch.testing.assert_close(together, torch.cat([alone, some(tokens[1:])]), **EXACT)
    masks = [value for value in some._apart(documents).values() if isinstance(value, Tensor) and value.ndim > 2]
    assert bool(masks) == (not windowed and implementation != "flex_attention")


ROUTED = GROUPED | {"head_dim": 8, "num_experts_per_tok": 2, "sliding_window": 6}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
GPT_OSS = ROUTED | KINDS | {"num_local_experts": 4}
HEADS = {"vocab_size": 272, "hidden_size": 16, "num_attention_heads": 4, "n_head": 4}
APART: dict[str, tuple[str, dict[str, Any], str]] = {
    # name -> type, values, and how documents are masked; "": the model is refused
    "gpt-oss": ("gpt_oss", GPT_OSS, "masks by kind"),
    "AFMoE": ("afmoe", ROUTED | KINDS | {"num_experts": 4, "moe_intermediate_size": 8}, "masks by kind"),
    "without a balance loss": ("gpt_oss", GPT_OSS | {"router_aux_loss_coef": 0.0}, "masks by kind"),
    "Mistral": ("mistral", GROUPED | {"sliding_window": 3}, "positions"),
    "Falcon with ALiBi": ("falcon", HEADS | {"alibi": True}, ""),
    "BLOOM": ("bloom", HEADS, ""),
    "Mamba": ("mamba", HEADS | {"num_hidden_layers": 2}, ""),
    "RecurrentGemma": ("recurrent_gemma", GROUPED | {"lru_width": 16, "attention_window_size": 8}, ""),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", APART)
def test_documents_are_kept_apart_or_the_model_is_refused(name: str, tmp_path: Path) -> None:
    """Before, the first two let conversations see each other in silence, and Falcon with ALiBi ended in a traceback."""
    kind, values, masking = APART[name]
    some = built(write_config(tmp_path, kind, **values)).train()
    generator, before = torch.get_rng_state(), copy.deepcopy(some.state_dict())
    if not masking:
        with pytest.raises(ConfigurationError, match=r"can't mask the documents .*--data.packing single"):
            some.keep_documents_apart()
        return
    some.keep_documents_apart()
    assert some.masking == masking
    assert some.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[key]) for key, value in some.state_dict().items())
    tokens, documents = batch(length=24), torch.tensor([[0] * 10 + [1] * 14, [2] * 24])
    with torch.no_grad():
        together = some.eval()(tokens, documents=documents)
        alone = torch.cat([some(piece) for piece in tokens[:1].split([10, 14], 1)], 1)
        torch.testing.assert_close(together, torch.cat([alone, some(tokens[1:])]), **EXACT)
        loss, cross_entropy = some.loss(tokens[:, :-1], tokens[:, 1:], documents[:, :-1])
    assert (float(loss) > float(cross_entropy)) == (some.balance_loss > 0)


class Mean(nn.Module):
    """Adds to each token the mean of those that it sees."""

    def __init__(self, *, masks: bool, zeros: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.mixing = nn.Parameter(torch.zeros(8, 8) if zeros else torch.eye(8))
        self.masks = masks

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        hidden = self.embedding(tokens)
        sees = torch.ones(tokens.shape[1], tokens.shape[1]).tril().expand(len(tokens), -1, -1)
        if documents is not None and self.masks:
            sees = sees * (documents.unsqueeze(2) == documents.unsqueeze(1))
        logits: Tensor = self.head(hidden + sees / sees.sum(2, keepdim=True) @ hidden @ self.mixing)
        return logits


@pytest.mark.parametrize("zeros", [False, True])
def test_a_model_that_takes_documents_and_does_not_use_them_is_refused(zeros: bool) -> None:
    """Also if its layers begin as zeros, so that its fresh logits show nothing."""
    for masks in (False, True):
        model = ForeignModel(Mean(masks=masks, zeros=zeros), vocab_size=31, max_sequence_length=16)
        before = copy.deepcopy(model.state_dict())
        if masks:
            model.keep_documents_apart()
        else:
            with pytest.raises(ConfigurationError, match=r"Mean can't mask .*changing a document moves"):
                model.keep_documents_apart()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_layers_are_blocks_of_the_model_and_fragments_cover_it(model: HuggingFaceModel) -> None:
    assert model.num_layers == model.wrapped.config.num_hidden_layers
    fragments = partition(model, num_fragments=4)
    assert sorted(n for f in fragments for n in f.names) == sorted(dict(model.named_parameters()))
    inside = [{name.split(".")[3] for name in fragment.names} for fragment in fragments[1:]]
    assert inside == [{"0"}, {"1"}, {"2"}] or all("layers" in f.names[0] for f in fragments[1:])
    assert not any("layers." in name or ".h." in name for name in fragments[0].names)


def test_weights_are_begun_from_as_float32_or_drawn_anew(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    torch.manual_seed(5)
    stored = LlamaForCausalLM(config_of("Llama")).to(torch.bfloat16)
    stored.save_pretrained(tmp_path)
    model, fresh = built(tmp_path), built(tmp_path, weights="fresh")
    assert {p.dtype for p in (*model.parameters(), *fresh.parameters())} == {torch.float32}
    for name, value in stored.state_dict().items():
        assert torch.equal(model.wrapped.state_dict()[name], value.float())
    assert not torch.equal(fresh.wrapped.lm_head.weight, model.wrapped.lm_head.weight)
    filled = built(tmp_path, device="meta", weights="fresh")
    filled.fill(torch.device("cpu"), seed=0, group=ReplicaGroup())  # as each rank of a sharded replica fills its own
    assert torch.equal(fresh.wrapped.lm_head.weight, filled.wrapped.lm_head.weight)
    with pytest.raises(ConfigurationError, match=r"(?s)LlamaConfig can't be used: .*mismatch"):
        built(tmp_path, vocab_size=300)
    with pytest.raises(ConfigurationError, match=r"lack model\.layers\.3.*weights fresh"):
        built(tmp_path, num_hidden_layers=4)
    stored.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert torch.equal(built(tmp_path / "parts").wrapped.lm_head.weight, model.wrapped.lm_head.weight)
    first = next((tmp_path / "parts").glob("*-00001-of-*"))
    shutil.copy(first, first.with_name("model-00001-of-00099.safetensors"))  # of weights that were there before
    with pytest.raises(CheckpointError, match=r"both hold .* Keep one of them"):
        built(tmp_path / "parts")
    for shard in (tmp_path / "parts").glob("model-*"):
        shard.unlink()
    with pytest.raises(CheckpointError, match="has no weights file"):  # only the index was fetched
        built(tmp_path / "parts")
    larger = built(tmp_path, vocab_size=300, weights="fresh", num_hidden_layers=4)
    assert (larger.vocab_size, larger.num_layers) == (300, 4)


def test_what_can_not_be_trained_is_refused(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    for kind in ("bert", "t5"):
        changes = small | {"vocab_size": 99} if kind == "bert" else {}
        with pytest.raises(ConfigurationError, match="is not a causal language model of text alone"):
            built(write_config(tmp_path, kind, **changes))
    quantised = config_of("Llama")
    quantised.quantization_config = {"quant_method": "gptq", "bits": 4}
    quantised.save_pretrained(tmp_path / "quantised")
    with pytest.raises(ConfigurationError, match="not quantised"):
        built(tmp_path / "quantised")
    llama = write_config(tmp_path, "Llama")
    (llama / "pytorch_model.bin").write_bytes(b"any code")
    with pytest.raises(CheckpointError, match="a pickle, which could run any code"):
        built(llama)
    with pytest.raises(ConfigurationError, match=r"num_hidden_layer is not a part.*'num_hidden_layers'"):
        built(llama, weights="fresh", num_hidden_layer=2)
    (llama / "config.json").write_text('{"model_type": "mine", "auto_map": {}}', encoding="utf-8")
    with pytest.raises(ConfigurationError, match="does not know, and code that comes with a model is not run"):
        built(llama)
    (llama / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        built(llama)
    with pytest.raises(ConfigurationError, match="which is not a local folder can't be used: Repo id must be"):
        built(tmp_path / "gone")


def test_a_name_on_the_hub_is_fetched_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a hub: the request it would get, and the message if it sends nothing."""
    import huggingface_hub

    asked: list[tuple[str, str | None, list[str]]] = []

    def fetched(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        if name == "somebody/gone":
            raise OSError("no such repository")
        return str(write_config(tmp_path, "Llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    monkeypatch.chdir(tmp_path)
    built(Path("somebody/llama@v2"), weights="fresh")
    built(Path("somebody/llama"), device="meta")
    with pytest.raises(CheckpointError, match=r"has no weights file model\.safetensors"):
        built(Path("somebody/llama"))
    names = [("somebody/llama", "v2"), ("somebody/llama", None), ("somebody/llama", None)]
    assert [(name, revision) for name, revision, _ in asked] == names
    weights = [{pattern for pattern in patterns if "safetensors" in pattern} for _, _, patterns in asked]
    assert weights[:2] == [set(), set()]
    assert weights[2]
    assert not any(pattern.endswith((".bin", ".py")) for _, _, patterns in asked for pattern in patterns)
    with pytest.raises(ConfigurationError, match="which is not a local folder can't be used: no such repository"):
        built(Path("somebody/gone"))


def test_the_token_that_others_pad_with_learns_like_any_other(tmp_path: Path) -> None:
    """In many models the padding token is the end-of-document token."""
    model = built(write_config(tmp_path, "Llama", pad_token_id=PAD, eos_token_id=PAD))
    tokens = torch.tensor([[3, PAD, 5, PAD, 3, 9]])
    model.loss(tokens[:, :-1], tokens[:, 1:]).loss.backward()
    assert model.wrapped.get_input_embeddings().weight.grad.any(1).nonzero().flatten().tolist() == [3, 5, PAD]
    assert model.definition()["config"]["pad_token_id"] == PAD, "the configuration must still name it"
