"""Preset, TOML file and command line: their precedence, the names of flags, and invalid settings."""

from pathlib import Path
from typing import Any

import pytest

from diloco.config import Configuration, compose, flatten, keys_of, parse_arguments, plan_run, preset_values
from diloco.errors import ConfigurationError
from diloco.model import PRESETS, get_preset
from diloco.train import notes, resolve
from tests.command_lines import command_line, load_configuration, toml_file


def test_the_order_is_preset_then_file_then_flags(tmp_path: Path) -> None:
    file = toml_file(tmp_path, "seed = 3\n[optimizer]\nlearning_rate = 1\n[network]\nreplicas = 2\n")
    run = load_configuration(["--replicas", "8", str(file)])
    assert run.train.sequence_length == get_preset("tiny").sequence_length
    assert run.sync.inner_steps == 10
    assert (run.optimizer.learning_rate, type(run.optimizer.learning_rate)) == (1.0, float)
    assert (run.seed, run.network.replicas) == (3, 8)


FLAGS: dict[str, tuple[str, Any]] = {
    "--steps 7": ("train.steps", 7),
    "--sync.num-fragments 2": ("sync.num_fragments", 2),
    "--data a b": ("data.paths", ("a", "b")),
    "--out runs/y": ("out", Path("runs/y")),
    "--preset 2m": ("preset", "2m"),
    "--optimizer.clip-norm None": ("optimizer.clip_norm", None),
    "--compile": ("train.compile", True),
    "--error-feedback 0": ("sync.error_feedback", False),
    "--merge_alpha=0.25": ("sync.merge_alpha", 0.25),
    "--sync.arguments.outer.betas [0.8,0.9]": ("sync.arguments", {"outer": {"betas": (0.8, 0.9)}}),
    "--emulate.latency 20ms": ("emulate.latency", (0.02,)),
    "--emulate.bandwidth=100Mbit": ("emulate.bandwidth", (1e8,)),
    "--emulate.step-time 1.5s": ("emulate.step_time", (1.5,)),
    "--optimizer.arguments.weight-decay 0": ("optimizer.arguments", {"weight_decay": 0}),
    "--model.arguments.tie-embeddings": ("model.arguments", {"tie_embeddings": True}),
    "--network.allow Qm1 --network.allow=Qm2 Qm3": ("network.allow", ("Qm1", "Qm2", "Qm3")),
}


def test_flags_set_their_key_and_nothing_else() -> None:
    line = parse_arguments([word for flag in FLAGS for word in flag.split()])
    assert line.values == dict(FLAGS.values())
    values = flatten(compose(line))
    assert {name: values[name] for name in line.values if "arguments" not in name} == {
        name: value for name, value in line.values.items() if "arguments" not in name
    }


def test_help_fits_on_two_screens_and_all_of_it_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stopped:
            parse_arguments([word])
        assert stopped.value.code == 0
        shown[word] = capsys.readouterr().out
        assert "None" not in shown[word].replace("None: no clipping", "")
    assert len(shown["--help"].splitlines()) <= 120
    for key in keys_of(Configuration).values():
        assert key.flag in shown["--help-all"], key.name
        assert all(f"{alias} " in shown["--help"].replace(",", " ") for alias in key.aliases)


def test_shares_of_a_preset_follow_the_length_of_the_run(tmp_path: Path) -> None:
    values = preset_values("tiny", {"train.steps": 30})
    assert (values["train.data_parallel_steps"], values["optimizer.warmup_steps"]) == (10, 7)
    file = toml_file(tmp_path, "[train]\nsteps = 30\n")
    for run in (load_configuration(["--steps", "30"]), load_configuration([str(file)])):
        assert (run.train.steps, run.train.data_parallel_steps, run.optimizer.warmup_steps) == (30, 10, 7)
    given_too = load_configuration([str(file), "--data-parallel-steps", "20"])
    assert given_too.train.data_parallel_steps == 20
    for steps in (1, 2, 3):
        resolve(compose(command_line(train__steps=steps)), num_layers=4)


@pytest.mark.parametrize(
    ("arguments", "start", "rate", "momentum", "rises"),
    [
        ("", 200, 0.4, 0.9, 0),
        ("--transport torch", 200, 0.4, 0.9, 0),
        ("--transport tcp", 0, 1.0, 0.8, 40),
        ("--transport swarm --run a", 0, 1.0, 0.8, 40),
        ("--transport swarm --run a --steps 90 --inner-steps 3", 0, 1.0, 0.8, 20),
        ("--transport tcp --steps 1", 0, 1.0, 0.8, 0),
        ("--transport tcp --data-parallel-steps 0", 0, 0.4, 0.9, 0),
        ("--transport swarm --run a --data-parallel-steps 50", 50, 0.4, 0.9, 0),
        ("--transport tcp --preset tiny-muon", 0, 1.0, 0.6, 40),
        ("--transport tcp --preset tiny-muon --sync.outer sgd", 0, 1.0, 0.6, 0),
        ("--transport tcp --outer-momentum 0.5 --sync.arguments.outer.schedule linear", 0, 1.0, 0.5, 40),
        ("--transport tcp --preset 2m", 0, None, 0.9, 0),
    ],
)
def test_over_links_a_preset_has_no_shared_start_and_the_outer_momentum_rises(
    arguments: str, start: int, rate: float, momentum: float, rises: int
) -> None:
    run = load_configuration(arguments.split())
    found = run.train.data_parallel_steps, run.sync.outer_learning_rate, run.sync.outer_momentum
    assert found == (start, rate, momentum)
    assert run.sync.arguments_of("outer").get("momentum_warmup", 0) == rises
    assert not any("has a gain" in note for note in notes(resolve(run, num_layers=run.model.decoder.layers)))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("algorithm", ["streaming", "diloco", "data-parallel"])
def test_every_preset_runs_with_every_algorithm(name: str, algorithm: str) -> None:
    run = compose(command_line(preset=name, algorithm=algorithm))
    resolved = resolve(run, num_layers=run.model.decoder.layers)
    assert resolved.train.sequence_length == get_preset(name).sequence_length


def test_a_table_of_arguments_changes_only_the_entries_that_it_names(tmp_path: Path) -> None:
    muon = {"matrix_lr_ratio": 2.5, "momentum": 0.95, "betas": (0.97, 0.99)}
    typed = {"optimizer.arguments": {"momentum": 0.95}}
    assert compose(command_line(preset="tiny-muon", **typed)).optimizer.arguments == muon
    renamed = compose(command_line(preset="tiny-muon", optimizer__name="SGD", **typed))
    assert renamed.optimizer.arguments == {"momentum": 0.95}
    file = toml_file(
        tmp_path,
        'preset = "tiny-muon"\n[optimizer.arguments]\nmomentum = 0.95\n[sync]\ncodec = "a:B"\n'
        "[sync.arguments.codec]\nkept = 8\ndense = true\n[sync.arguments.average]\nmax_norm = 1.0\n",
    )
    assert compose(command_line(file)).optimizer.arguments == muon
    composed = compose(command_line(file, sync__arguments={"codec": {"kept": 4}}))
    assert composed.sync.arguments["codec"] == {"kept": 4, "dense": True}
    other = compose(command_line(file, sync__codec="int8")).sync.arguments
    assert other == {"average": {"max_norm": 1.0}}


def test_the_sizes_of_the_decoder_are_arguments_of_the_model(tmp_path: Path) -> None:
    file = toml_file(tmp_path, "[model.arguments]\nlayers = 2\n")
    configuration = compose(command_line(file, model__arguments={"width": 64}))
    sizes = configuration.model.decoder
    assert (sizes.layers, sizes.width, sizes.ffn_width) == (2, 64, get_preset("tiny").model.ffn_width)
    with pytest.raises(ConfigurationError, match=r"model\.arguments\.layer is not .* did you mean 'layers'"):
        compose(command_line(model__arguments={"layer": 2}))


def test_checks_see_final_values_only(tmp_path: Path) -> None:
    """Neither the file nor the flags are valid alone. An error in the result comes from the checks of the settings."""
    file = toml_file(tmp_path, '[emulate]\nlatency = ["100ms", "0.2s"]\nstep_time = ["1s"]')
    assert load_configuration([str(file), "--replicas", "2"]).emulate.latency == (0.1, 0.2)
    with pytest.raises(ConfigurationError, match=r"latency must have .* one per replica \(4\), got 2 values"):
        load_configuration([str(file)])


def test_input_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "tokenizer.json").write_text("{}")
    words = "--data a ~/b --init-from w --tokenizer tokenizer.json --transport tcp --secret-file s"
    configuration = plan_run(parse_arguments(words.split())).configuration
    assert configuration.data.paths == (str(tmp_path / "a"), str(tmp_path / "home" / "b"))
    assert configuration.train.init_from == tmp_path / "w"
    assert configuration.network.secret_file == tmp_path / "s"
    assert configuration.data.tokenizer == str(tmp_path / "tokenizer.json")
    assert plan_run(parse_arguments([])).configuration.data.tokenizer == "bytes"
