"""What deploy/ says of the server is true: metrics, paths and options exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fakes import MODEL, ScriptedClient, ask, make_service

from tbo_jax.cli import serve

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_dashboard_asks_for_metrics_that_exist():
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|tbo):\w+", target["expr"])
    }
    assert len(asked) > 10
    service = make_service(ScriptedClient(MODEL))
    ask(service, "/v1/completions", {"prompt": "In", "max_tokens": 2, "stream": True})
    page = ask(service, "/metrics").text
    told = set(re.findall(r"^((?:vllm|tbo):\w+)", page, re.M))
    assert asked <= told


@pytest.mark.parametrize(
    "name", ["Dockerfile", "compose.yaml", "kubernetes.yaml", "tbo-jax.service"]
)
def test_options_and_paths_exist(name, capsys):
    text = (DEPLOY / name).read_text()
    with pytest.raises(SystemExit):
        serve.main(["--help"], "tbo-jax serve")
    known = capsys.readouterr().out
    for option in set(re.findall(r"--(?:host|port|served-model-name|shutdown-seconds)\b", text)):
        assert option in known
    service = make_service(ScriptedClient(MODEL))
    for path in set(re.findall(r"path: (/\w+)|8000(/\w+)", text)):
        assert ask(service, path[0] or path[1]).status_code == 200
