"""LoRA with peft: what is trained, what peft reads, and masked documents with adapters."""

import copy
import dataclasses
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from diloco.checkpoint import Lazy
from diloco.errors import ConfigurationError
from diloco.model import HuggingFaceModel, ModelSettings, base_digest, build_language_model, save_adapter
from diloco.trained import load_parameters, read_weights
from tests.finetuning import write_base

TOKENS = torch.arange(24).reshape(2, 12) % 11 + 40


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def adapted(base: Path, **changes: Any) -> HuggingFaceModel:
    """Return a model whose adapters have an effect."""
    model = build_language_model(ModelSettings(source=f"hf:{base}", lora_rank=4, arguments=changes), seed=0)
    assert isinstance(model, HuggingFaceModel)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
    return model.eval()


def trained(model: HuggingFaceModel) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


TIED = {"tie_word_embeddings": True}
MERGED: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("Llama", {}, ("embed_tokens", "lm_head", "q_proj")),
    ("GPT-2", {"n_positions": 256}, ("c_attn",)),
    ("GPT-NeoX", {}, ("lm_head", "embed_in")),
    ("Mixtral", {}, ("w1", "w2", "w3")),
    ("Qwen3-MoE", TIED, ("all-linear",)),
)


def reloaded(model: Any, place: Path) -> Any:
    """Merge, write and read again; the adapters are gone."""
    from transformers import AutoModelForCausalLM

    merged = model.to_huggingface()
    assert not [name for name in merged.state_dict() if "lora_" in name or "base_layer" in name]
    merged.save_pretrained(place)
    return AutoModelForCausalLM.from_pretrained(place).eval()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # peft's, when it adds the adapter
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # peft's, about its own
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft's warning about transformers
@pytest.mark.parametrize(("name", "changes", "targets"), MERGED, ids=str)
@torch.no_grad()
def test_peft_and_a_merged_model_give_the_logits_that_we_evaluate(
    tmp_path: Path, name: str, changes: dict[str, Any], targets: tuple[str, ...]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = write_base(tmp_path / "base", name=name, **changes)
    model = adapted(base, lora_targets=targets)
    expected = model(TOKENS)
    save_adapter(tmp_path / "adapter", model, trained(model))
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    assert float((expected - plain(TOKENS).logits).abs().max()) > 1e-2
    assert torch.equal(PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(TOKENS).logits, expected)
    again = reloaded(model, tmp_path / "merged")
    torch.testing.assert_close(again(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_saved_adapter_names_its_base_and_the_revision_of_that_apart(llama: Path, tmp_path: Path) -> None:
    """Before, they were one name, which peft does not find on the hub."""
    model = adapted(llama)
    model.settings = dataclasses.replace(model.settings, source="hf:somebody/llama@v2")
    save_adapter(tmp_path, model, trained(model))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("somebody/llama", "v2")


@torch.no_grad()
def test_a_small_adapter_beside_16_bit_weights_does_not_vanish_in_their_rounding(llama: Path, tmp_path: Path) -> None:
    model = adapted(llama, base_dtype="bfloat16")
    for parameter in trained(model).values():
        parameter.mul_(0.05)
    expected = copy.deepcopy(model).float()(TOKENS)
    torch.testing.assert_close(reloaded(model, tmp_path)(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_adapters_change_nothing_before_they_are_trained_and_are_all_that_is(llama: Path) -> None:
    plain = build_language_model(ModelSettings(source=f"hf:{llama}"), seed=0).eval()
    model = build_language_model(ModelSettings(source=f"hf:{llama}", lora_rank=2), seed=0).eval()
    assert torch.equal(model(TOKENS), plain(TOKENS))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name for name in names)
    assert model.num_trained() == sum(
        2 * (i + o) * 3 for i, o in ((16, 16), (16, 8), (16, 8), (16, 16), *[(16, 24)] * 3)
    )
    assert set(model.saved_state()) == set(names)


FLOPS: tuple[tuple[int, tuple[str, ...], dict[str, Any], float], ...] = (
    (0, (), {}, 1.0),
    (2, ("all-linear",), {}, 1.01),
    (2, ("all-linear",), TIED, 1.01),
    (2, ("down_proj",), {}, 1.01),
    (2, ("model.layers.7.mlp.up_proj",), {}, 1.01),  # no gradient reaches the seven layers below
)


@pytest.mark.parametrize(("rank", "targets", "changes", "most"), FLOPS)
def test_operations_are_those_that_torch_counts_also_of_frozen_weights(
    rank: int, targets: tuple[str, ...], changes: dict[str, Any], most: float, tmp_path: Path
) -> None:
    """Before, frozen weights counted as trained ones, 1.4 times as many in all. What is over is that the queries, keys
    and values of the first layer with an adapter share one input without a gradient. A row of one token leaves
    attention no half that is masked."""
    base = write_base(tmp_path, num_hidden_layers=8, **changes)
    arguments: dict[str, Any] = {"attn_implementation": "eager"} | ({"lora_targets": targets} if rank else {})
    model = build_language_model(ModelSettings(source=f"hf:{base}", lora_rank=rank, arguments=arguments), seed=0)
    tokens = TOKENS.reshape(-1, 1)
    with FlopCounterMode(display=False) as counted:
        torch.autograd.backward(model.loss(tokens, tokens).loss)
    assert 1.0 <= model.flops_per_token(1) * tokens.numel() / counted.get_total_flops() <= most


@torch.no_grad()
def test_weights_are_read_one_at_a_time(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, all of them were in memory at once, as the first one was copied. They are bfloat16, so none is shared."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(llama).bfloat16().save_pretrained(tmp_path)
    unread, most = Lazy.__getitem__, 0
    live: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def read(values: Lazy, name: str) -> torch.Tensor:
        nonlocal most
        tensor = unread(values, name)
        live.add(tensor)
        most = max(most, len(live))
        return tensor

    monkeypatch.setattr(Lazy, "__getitem__", read)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # else transformers reads some ahead
    model = build_language_model(ModelSettings(source=f"hf:{tmp_path}"), seed=0)
    for place in (tmp_path, tmp_path / "model.safetensors"):
        load_parameters(model, read_weights(place, ModelSettings(source=f"hf:{tmp_path}")))
    assert 1 <= most <= 2  # of 30: a name may still have the last one when the next is read


def test_the_digest_is_of_the_weights_and_not_of_their_files(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    settings = ModelSettings(source=f"hf:{llama}", lora_rank=2)
    digest = base_digest(settings)
    assert len(digest) == 32
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path / "sharded", max_shard_size="4KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert base_digest(dataclasses.replace(settings, source=f"hf:{tmp_path / 'sharded'}")) == digest
    other = write_base(tmp_path / "other", seed=1)
    assert base_digest(dataclasses.replace(settings, source=f"hf:{other}")) != digest
    fresh = ModelSettings(source=f"hf:{llama}", arguments={"weights": "fresh"})
    assert base_digest(ModelSettings()) == base_digest(fresh) == ""


REFUSED: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"source": None}, {}, "needs a model of transformers"),
    ({}, {"weights": "fresh"}, "adapts stored weights"),
    ({"lora_rank": -1}, {}, "lora_rank must be a whole number of at least 0"),
    ({"lora_rank": 0}, {"lora_targets": ["q_proj"]}, r"arguments\.lora_targets has an effect only with LoRA"),
    ({}, {"base_dtype": "int3"}, r"model\.arguments: Invalid enum value 'int3' - at `\$\.base_dtype`"),
)


@pytest.mark.parametrize(("changes", "arguments", "words"), REFUSED)
def test_adapters_that_can_not_work_are_refused(changes: dict[str, Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ModelSettings(**{"source": "hf:x", "lora_rank": 2, "arguments": arguments} | changes)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_targets_that_are_not_there_or_tied_are_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="projection that is tied to the embedding"):
        adapted(write_base(tmp_path, **TIED), lora_targets=("lm_head",))
    with pytest.raises(ConfigurationError, match=r"peft refused the adapters: .*qproj"):
        adapted(llama, lora_targets=("qproj",))
