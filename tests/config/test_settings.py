"""The settings: their number and their units."""

from pathlib import Path

import pytest

from diloco.config import Configuration, keys_of, parse_arguments
from diloco.errors import ConfigurationError
from diloco.traits import Trait

MOST = 78
"""It may only fall. A setting is added with a benchmark row which shows that users must set it."""


def test_there_are_few_settings() -> None:
    assert len(keys_of(Configuration)) <= MOST


def test_every_setting_says_what_it_means() -> None:
    for key in keys_of(Configuration).values():
        assert key.help.endswith((".", ")")), key.name


def test_a_text_or_path_is_a_place_unless_its_annotation_says_that_it_is_none() -> None:
    """So that a new one is closed to the settings of a fetched run, without a list that somebody has to remember."""
    texts = {key.name for key in keys_of(Configuration).values() if key.kind in (str, Path)}
    places = {key.name for key in keys_of(Configuration).values() if key.is_place}
    assert texts - places == {
        *("preset", "train.device", "train.init_from", "optimizer.name", "evaluation.sample_prompts"),
        *("sync.codec", "sync.outer", "sync.merge", "sync.average", "data.text_field"),
        *("network.run", "network.name", "network.allow"),
    }
    assert places >= {"checkpoint.mirror", "monitor.prometheus", "monitor.sinks", "data.paths", "network.secret_file"}


def test_the_traits_of_settings_are_these() -> None:
    """Where one is missing, a run refuses to resume, or tells others of this machine."""

    keys = keys_of(Configuration).values()

    def sections_and_keys(trait: Trait) -> set[str]:
        names = set()
        for key in keys:
            section = [each for each in keys if key.section and each.section == key.section]
            whole = section and all(trait in each.traits for each in section)
            if trait in key.traits:
                names.add(key.section if whole else key.name)
        return names

    assert sections_and_keys(Trait.OF_CALL) == {"out", "train.stop_after", "checkpoint.resume"}
    process = {"network.replica", "network.join", "network.listen", "network.announce"}
    assert sections_and_keys(Trait.OF_PROCESS) == process
    assert sections_and_keys(Trait.OF_MACHINE) == {
        *("out", "checkpoint", "monitor", "emulate", "train.device", "train.global_device", "train.stop_after"),
        *("network.name", "network.secret_file"),
    }
    assert sections_and_keys(Trait.CHANGEABLE) == {
        *("train.steps", "train.stop_after", "train.activation_checkpointing", "train.global_device", "out"),
        *("evaluation", "checkpoint", "monitor", "network", "emulate", "data.paths"),
    }


@pytest.mark.parametrize(
    "words", ["--network.silence 15", "--emulate.latency 0.1", "--emulate.bandwidth 100MB", "--emulate.step-time fast"]
)
def test_a_number_without_its_unit_is_refused_with_an_example(words: str) -> None:
    with pytest.raises(ConfigurationError, match=r"such as '(80ms|500Mbit)'"):
        parse_arguments(words.split())
