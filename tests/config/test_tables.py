"""Numbers in the free tables of arguments: what no model can be trained with is refused by its key, before training."""

from pathlib import Path

import pytest

from diloco.config import compose, parse_arguments
from diloco.errors import ConfigurationError
from diloco.model import DecoderSettings, ModelSettings, build_language_model, build_model
from diloco.train import OptimizerSettings, check_components, make_inner_optimizer
from tests.huggingface import write_config

NOT_NUMBERS = ("1e400", "inf", "nan", "-inf", "1e308", "-1e308", "true", str(10**400))
"""1e308 is infinite in float32."""

# a key of a table, and what else the file says
TABLES: tuple[tuple[str, str], ...] = (
    ("model.arguments.norm_epsilon", ""),
    ("model.arguments.rope_theta", ""),
    ("model.arguments.z_loss", ""),
    ("optimizer.arguments.eps", ""),
    ("optimizer.arguments.weight_decay", ""),
    ("optimizer.arguments.betas", ""),
    ("optimizer.arguments.momentum", 'optimizer.name = "SGD"'),
    ("optimizer.arguments.eps", 'optimizer.name = "Muon"'),
    ("optimizer.arguments.weight_decay", 'optimizer.name = "Muon"'),
    ("optimizer.arguments.matrix_lr_ratio", 'optimizer.name = "Muon"'),
    ("optimizer.arguments.rate", 'optimizer.name = "OWN:Own"'),
    ("sync.arguments.outer.final_ratio", ""),
    ("sync.arguments.average.max_norm", ""),
    ("sync.arguments.average.weight", ""),
    ("sync.arguments.codec.block_size", 'sync.codec = "int8"'),
    ("sync.arguments.merge.share", 'sync.merge = "OWN:Merge"'),
    ("model.arguments.lora_alpha", 'model.source = "hf:somewhere"\nmodel.lora_rank = 2'),
    ("optimizer.learning_rate", ""),
    ("train.steps", ""),
)

OWN = """
import torch
from diloco import MergeRule

class Own(torch.optim.SGD):
    def __init__(self, groups, lr, rate=0.5):
        super().__init__(groups, lr)

class Merge(MergeRule):
    def __init__(self, share=0.5):
        pass
"""


@pytest.mark.parametrize("value", NOT_NUMBERS)
@pytest.mark.parametrize(("key", "more"), TABLES)
def test_what_is_no_finite_number_is_refused_by_its_key(key: str, more: str, value: str, tmp_path: Path) -> None:
    own, file = tmp_path / "own.py", tmp_path / "run.toml"
    own.write_text(OWN)
    if key.endswith("betas"):
        value = f"[0.9, {value}]"
    more = more.replace("OWN", str(own))
    file.write_text(f"{more}\n{key} = {value}\n")
    with pytest.raises(ConfigurationError, match=key.rpartition(".")[2]):
        check_components(compose(parse_arguments([str(file)])))


CHANGED = ("rms_norm_eps", "rope_theta", "initializer_range", "attention_dropout", "num_hidden_layers")


@pytest.mark.parametrize("value", [1e308, float("inf"), float("nan"), -1, True, 10**400])
@pytest.mark.parametrize(
    "name", ["rms_norm_eps", "rope_theta", "initializer_range", "attention_dropout", "num_hidden_layers"]
)
def test_changes_of_a_configuration_of_transformers(name: str, value: float, tmp_path: Path) -> None:
    folder = write_config(tmp_path, "Llama")
    with pytest.raises(ConfigurationError, match=name):
        build_language_model(ModelSettings(source=f"hf:{folder}", arguments={name: value}), seed=0, device="meta")


@pytest.mark.parametrize("value", ["1e400", "NaN", '{"__float__": "Infinity"}'])
def test_a_stored_configuration_with_an_infinite_number_is_refused(value: str, tmp_path: Path) -> None:
    file = write_config(tmp_path, "Llama") / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', f'"rms_norm_eps": {value}'))
    with pytest.raises(ConfigurationError, match="rms_norm_eps must be a finite number"):
        build_language_model(ModelSettings(source=f"hf:{file.parent}"), seed=0, device="meta")


def test_the_infinity_that_an_architecture_has_by_default_is_read_and_can_be_saved(tmp_path: Path) -> None:
    """Before, Mamba 2 as transformers saves it was refused, and the checkpoints of another file of it failed."""
    sizes = {
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
        "hidden_size": 32,
        "vocab_size": 272,
        "num_hidden_layers": 1,
    }
    folder = write_config(tmp_path, "mamba2", **sizes)
    settings = ModelSettings(source=f"hf:{folder}")
    model = build_language_model(settings, seed=0, device="meta")
    again = build_language_model(settings, seed=0, device="meta", definition=model.definition())
    assert again.definition() == model.definition()
    assert model.definition()["config"]["time_step_limit"] == [0.0, {"__float__": "Infinity"}]


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
def test_the_optimizer_of_the_library_refuses_them_too(name: str) -> None:
    from diloco import muon

    model = build_model(DecoderSettings(layers=1, width=8, ffn_width=16, heads=2, vocab_size=31), seed=0)
    with pytest.raises(ConfigurationError, match=f"{name} must be a finite number of at least 0, got inf"):
        muon(model, **{name: float("inf")})


def test_numbers_in_range_are_taken_as_they_are() -> None:
    settings = OptimizerSettings(arguments={"eps": 0, "weight_decay": 1e-30, "betas": (0.0, 0.999), "amsgrad": True})
    model = build_model(DecoderSettings(layers=1, width=8, ffn_width=16, heads=2, vocab_size=31), seed=0)
    assert make_inner_optimizer(settings, model).param_groups[0]["amsgrad"] is True
