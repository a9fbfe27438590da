"""``diloco presets``: list the model presets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tyro.conf import FlagCreatePairsOff

from diloco.algorithm import SyncSettings
from diloco.cli.tables import columns
from diloco.config import parse_options, preset_values
from diloco.model import get_preset, preset_names


@dataclass(frozen=True, kw_only=True)
class PresetsOptions:
    """List the model presets, for `diloco train --preset NAME`.

    Examples:
      diloco presets
      diloco train --preset streaming-35m --data texts/ --print-config
    """

    json: FlagCreatePairsOff[bool] = False
    """Print one JSON object with every setting of every preset, by name."""


def run(arguments: Sequence[str]) -> int:
    """Print the table."""
    options = parse_options(PresetsOptions, "presets", arguments)
    presets = [get_preset(name) for name in preset_names()]
    if options.json:
        print(json.dumps({p.name: {**asdict(p), "settings": preset_values(p.name)} for p in presets}, indent=2))
        return 0
    rows = []
    for preset in presets:
        values, model = preset_values(preset.name), preset.model
        heads = str(model.heads) if model.kv_heads is None else f"{model.heads}/{model.kv_heads}"
        inner_steps = values.get("sync.inner_steps", SyncSettings().inner_steps)
        numbers = (model.layers, model.width, model.ffn_width, heads, preset.vocab_size, inner_steps)
        rows.append([preset.name, f"{preset.parameters:,}", *map(str, numbers), str(values["train.steps"])])
    print(columns(["name", "parameters", "layers", "width", "ffn", "heads", "vocab", "H", "steps"], rows))
    return 0
