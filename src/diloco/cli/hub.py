"""Pushing an export to the Hugging Face hub, with a card that says how the model was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.checkpoint import open_checkpoint
from diloco.config import CONFIG_FILE, read_record
from diloco.errors import ConfigurationError, DataError, DiLoCoError, from_extra
from diloco.model import CARD_NAME, base_card
from diloco.monitor import read_metrics
from diloco.units import format_bytes, format_count, visible

if TYPE_CHECKING:
    from diloco.model import ModelSettings
    from diloco.trained import Trained

_LOADED_FIRST = {"adapter_config.json", "model.safetensors"}  # by transformers, whatever else is there

_TEXT = """---
{header}
---
# {name}

{how} The weights are the {weights} after step {step}.

| | |
|---|---|
{table}

The digest is that of the global parameters{shared}.
"""
_DILOCO = "[DiLoCo](https://arxiv.org/abs/2311.08105)"


def model_card(trained: Trained, name: str, *, adapter: bool) -> str:
    """Return the card of the model of a run: what its checkpoint, settings and log say, without any path."""
    assert trained.step is not None
    settings, checkpoint = read_record(trained.run / CONFIG_FILE), open_checkpoint(trained.path)
    train, sync, inner, model = settings.train, settings.sync, settings.optimizer, settings.model
    replicas = checkpoint.fact("num_replicas", int, least=1)
    base = base_card(model) if model.kind == "hf" else {}
    header = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation", **base}
    if replicas == 1:
        how = "This model was trained with diloco, by one replica."
    elif settings.algorithm in ("streaming", "diloco"):
        how = f"This model was trained with {_DILOCO}: replicas train alone and average their progress every few steps."
    else:
        how = f"This model was trained with diloco, by {replicas} replicas with the algorithm {settings.algorithm}."
    rounds = {
        "inner steps (H)": sync.inner_steps,
        "fragments (P), overlap (tau)": f"{sync.num_fragments}, {sync.overlap_steps} steps",
        "outer optimizer": f"{sync.outer}, learning rate {sync.outer_learning_rate:g}",
    }
    rows: dict[str, object] = {
        "algorithm": settings.algorithm,
        **_origin_of(model, base, adapter=adapter),
        "replicas (M)": replicas,
        **(rounds if settings.algorithm in ("streaming", "diloco") else {}),
        "codec": sync.codec or "float32",
        "inner optimizer": f"{inner.name}, learning rate {inner.learning_rate:g}, {inner.schedule}",
        "shared data-parallel steps": train.data_parallel_steps,
        "batch": f"{train.batch_size} sequences of {train.sequence_length} tokens per replica and step",
        "precision": train.precision,
        "seed": settings.seed,
        **_log(trained.run / "metrics.jsonl", trained.step),
        "digest": checkpoint.fact("global_params_digest", str),
        "versions": ", ".join(f"{package} {version}" for package, version in checkpoint.versions.items()),
    }
    return _TEXT.format(
        header="\n".join([*(f"{key}: {value}" for key, value in header.items()), "tags:\n- diloco"]),
        name=name.rpartition("/")[2],
        how=how,
        shared=", which all replicas of the run share bit for bit" if replicas > 1 else "",
        weights=trained.weights,
        step=f"{trained.step:,} of {train.steps:,}",
        table="\n".join(f"| {key} | {visible(str(value).replace('|', '/'), 500)} |" for key, value in rows.items()),
    )


def _origin_of(model: ModelSettings, base: Mapping[str, str], *, adapter: bool) -> Mapping[str, object]:
    """Return the rows on the base model, if there is one."""
    if not base:
        return {}
    rows: dict[str, object] = {"base model": base["base_model"]}
    if model.lora_rank:
        rows["LoRA"] = f"rank {model.lora_rank}{'' if adapter else ', merged into the base model'}"
    if "license" not in base:
        rows["licence"] = "that of the base model, whose card states none here"
    return rows


def _log(path: Path, step: int) -> Mapping[str, object]:
    """Return what a run's log says up to a step; nothing without one."""
    try:
        return _facts([record for record in read_metrics(path) if record["step"] <= step])
    except FileNotFoundError:
        return {}
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:  # the run may be from elsewhere
        raise DataError(f"{path} is not a log of this version: {error!r}.") from error


def _facts(records: Sequence[Mapping[str, Any]]) -> Mapping[str, object]:
    latest = {record["event"]: record for record in records}
    rows: dict[str, object] = {}
    if "RunStarted" in latest:
        rows["data"] = latest["RunStarted"]["facts"].get("data", "")
    if finished := latest.get("StepFinished"):
        rows["tokens"] = format_count(finished["tokens"])
        rows["training loss"] = f"{float(finished['loss']):.4f} nats per token"
        rows["sent"] = f"{format_bytes(finished['sent_bytes'])} per replica"
    if evaluated := latest.get("Evaluated"):
        rows["held-out loss"] = f"{float(evaluated['heldout_loss']):.4f} nats per token at step {evaluated['step']:,}"
        rows["held-out bits per byte"] = f"{float(evaluated['bits_per_byte']):.4f}"
    return rows


def push(folder: Path, repo: str, *, private: bool, dry_run: bool) -> str:
    """Push the exported ``folder`` in one commit, and return a sentence about it. A card that is there already stays.

    Raises:
        DiLoCoError: the hub refuses it, or can't be reached; nothing but an empty repository can have been created.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    size = format_bytes(sum(path.stat().st_size for path in files))
    what = f"{len(files)} files, {size}, to {'a private' if private else 'a public'} {repo}"
    if dry_run:
        card = (folder / CARD_NAME).read_text("utf-8")
        return f"{card}\nwould push {what}: {', '.join(path.name for path in files)}"
    with from_extra("hf", "--push needs huggingface_hub"):
        from huggingface_hub import HfApi
    api = HfApi(library_name="diloco")
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        about = api.model_info(repo)  # it may have been there before
        if private and not about.private:
            raise ConfigurationError("it is public. Leave --private out, or make it private on the hub")
        there = {sibling.rfilename for sibling in about.siblings or ()}
        if other := sorted((there & _LOADED_FIRST) - {path.name for path in files}):
            raise ConfigurationError(f"its {other[0]} would be loaded instead. Delete it there, or use another one")
        kept = [CARD_NAME] if CARD_NAME in there else []
        api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=kept, commit_message="Export of diloco")
    except Exception as error:  # of the hub, of the network, or of a missing token: they have no common type
        why = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        raise DiLoCoError(f"{folder} is complete, but can't be pushed to {repo}: {why}") from error
    return f"pushed {what}: {url}{'; the card that was there stays' if kept else ''}"
