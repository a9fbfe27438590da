"""Write ``dashboard.json`` beside this file: ``python launch/grafana/dashboard.py``.

Each metric of `diloco.events` has a panel; further panels show what else ``/metrics`` has.
"""

import json
from pathlib import Path
from typing import Any

from diloco.events import METRICS
from diloco.metrics import Metric

UNITS = {"share": "percentunit", "bytes": "bytes", "s": "s"}
STATE = (  # title, what is drawn, its legend
    ("Step", "diloco_step{S}", "{{instance}}"),
    ("State", "diloco_state{S} == 1", "{{instance}} {{state}}"),
    ("Alerts", "diloco_alerts{S}", "{{instance}} {{kind}} ({{level}})"),
    ("Replicas in the view", "diloco_view_replicas{S}", "{{instance}}"),
    ("Seconds since the last checkpoint", "time() - diloco_checkpoint_timestamp_s{S}", "{{instance}}"),
)


def panel_of(metric: Metric) -> tuple[str, str, str, str]:
    """Return title, unit, what is drawn and its legend."""
    title = metric.title if metric.unit in ("", *UNITS) else f"{metric.title} ({metric.unit})"
    unit = UNITS.get(metric.unit, "short")
    if metric.kind not in ("total", "counter", "part"):
        return title, unit, f"diloco_{metric.name}{{S}}", "{{instance}} {{fragment}}{{peer}}{{replica}}"
    title = f"{title}, per second"
    unit = {"bytes": "Bps", "s": "percentunit"}.get(unit, unit)
    return title, unit, f"rate(diloco_{metric.name}_total{{S}}[5m])", "{{instance}} {{fragment}}{{peer}}"


def panels() -> list[dict[str, Any]]:
    rows = [(title, "short", drawn, legend) for title, drawn, legend in STATE]
    rows += [panel_of(metric) for metric in METRICS.values()]
    found = []
    for number, (title, unit, drawn, legend) in enumerate(rows):
        target = {"refId": "A", "expr": drawn.replace("{S}", '{instance=~"$instance"}'), "legendFormat": legend}
        found.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": title,
                "gridPos": {"x": 8 * (number % 3), "y": 7 * (number // 3), "w": 8, "h": 7},
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
                "targets": [target],
            }
        )
    return found


def dashboard() -> dict[str, Any]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    instances = {
        "name": "instance",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": "label_values(diloco_step, instance)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "title": "diloco",
        "uid": "diloco",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, instances]},
        "panels": panels(),
    }


if __name__ == "__main__":
    Path(__file__).with_suffix(".json").write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
