"""Components by name: ours, those registered in this process, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from diloco import AlphaMerge, ConfigurationError, Nesterov, SendersMean
from diloco.algorithm import (
    AVERAGES,
    CODECS,
    INNER_OPTIMIZERS,
    MERGE_RULES,
    OUTER_OPTIMIZERS,
    Float32,
    Registry,
    make_codec,
    muon,
)

REGISTRIES = [AVERAGES, CODECS, INNER_OPTIMIZERS, MERGE_RULES, OUTER_OPTIMIZERS]


@pytest.mark.parametrize(("registry", "name"), [(each, name) for each in REGISTRIES for name in each.names])
def test_every_name_has_code(registry: Registry, name: str) -> None:
    assert callable(registry.find(name))
    registry.check(name)


def test_codecs_are_named_as_they_are_registered_and_made_again_from_their_parameters() -> None:
    for name in CODECS.names:
        codec = make_codec(name)
        assert codec.name == name
        assert dict(make_codec(name, **codec.parameters()).parameters()) == dict(codec.parameters())
    assert make_codec("fp4", block_size=64).parameters() == {"block_size": 64}


def test_components_take_what_is_offered_and_fits_and_all_of_their_arguments() -> None:
    assert OUTER_OPTIMIZERS.make("nesterov", learning_rate=0.5, momentum=0.3, betas=(0, 0)) == Nesterov(
        learning_rate=0.5, momentum=0.3
    )
    assert MERGE_RULES.make("alpha", {"alpha": 0.5}, alpha=0.25) == AlphaMerge(0.5)
    assert AVERAGES.make("mean") is None
    assert AVERAGES.make("senders") == SendersMean()
    assert INNER_OPTIMIZERS.find("Muon") is muon


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_codec("bfloat"), r"no codec 'bfloat'; did you mean 'bfloat16'\?"),
        (lambda: make_codec("fp4", blok_size=64), r"no parameter 'blok_size'; did you mean 'block_size'\?"),
        (lambda: make_codec("float16", block_size=64), "'float16' has no parameter 'block_size'; it has none"),
        (lambda: OUTER_OPTIMIZERS.make("sgd", {"momentum": 0.9}), "outer optimizer 'sgd' has no parameter 'momentum'"),
        (
            lambda: MERGE_RULES.check("rebased"),
            "'rebased' is unknown; did you mean 'rebase'.* as module:Class or FILE",
        ),
        (lambda: CODECS.register("fp4", Float32), "can't be the codec 'fp4': the name is taken"),
        (lambda: CODECS.register("fp3", Float32()), "can't be the codec 'fp3': it is a Float32"),
    ],
)
def test_what_does_not_fit_is_refused(make: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()  # type: ignore[operator]


def test_a_component_registered_again_replaces_the_old_one() -> None:
    """As a notebook cell does that is run twice."""

    @dataclass
    class Other:
        factor: float = 1.0

    registry = Registry("thing", "a.thing", "builtins:object", {})
    for _ in range(2):
        registry.register("other", Other)
    assert registry.names == ("other",)
    assert registry.make("other", {"factor": 2.0}).factor == 2.0


def test_names_are_known_without_torch() -> None:
    code = "import sys; from diloco.algorithm import CODECS; CODECS.check('fp4'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
