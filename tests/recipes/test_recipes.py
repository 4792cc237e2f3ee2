"""Each component, launched by torchx run for a few steps, as a user would."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import tritonclient.http

ROOT = Path(__file__).parents[2]
TORCHX = str(Path(sys.executable).parent / "torchx")
# As in an activated environment: TorchX starts `torchrun` by name.
ACTIVATED = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def torchx(component: str, *arguments: str) -> str:
    """Run a component to its end; its output."""
    command = [TORCHX, "run", "-s", "local_cwd", f"recipes/{component}_component.py:{component}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=ACTIVATED, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_train_publish_serve_online(tmp_path: Path) -> None:
    output, artifacts = str(tmp_path / "run"), str(tmp_path / "artifacts")
    torchx("train", "--output", output, "--num_epochs", "1", "--max_requests", "512", "--num_ranks", "2")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert 0.4 < metrics["liked/auc"] < 1
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    torchx("publish", "--output", output, "--artifacts", artifacts)
    assert (tmp_path / "artifacts" / "movielens" / "snapshot-00000001" / "manifest.json").exists()

    command = [TORCHX, "run", "-s", "local_cwd", "recipes/serve_component.py:serve", "--artifacts", artifacts]
    with open(tmp_path / "serve.log", "w+") as log:
        server = subprocess.Popen(
            [*command, "--port", "0", "--poll_interval_s", "0.1"],
            cwd=ROOT,
            env=ACTIVATED,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            port = wait_for_port(tmp_path / "serve.log", server)
            client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}")
            assert client.is_model_ready("movielens")
            torchx("online", "--output", output, "--artifacts", artifacts, "--num_slices", "200", "--max_slices", "2")
            deadline = time.monotonic() + 30
            while client.get_model_metadata("movielens")["versions"] != ["3"]:
                assert time.monotonic() < deadline, (tmp_path / "serve.log").read_text()
                time.sleep(0.05)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=60)


def wait_for_port(log: Path, server: subprocess.Popen) -> int:
    deadline = time.monotonic() + 120
    while not (match := re.search(r"on http://127\.0\.0\.1:(\d+)", log.read_text())):
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return int(match[1])


def test_the_demo_writes_its_reports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.demo", "--output", str(tmp_path / "demo"), "--num-epochs", "1"]
    command += ["--max-train-requests", "1000", "--num-slices", "200", "--max-slices", "2", "--num-latency-calls", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "demo" / "report.json").read_text())["figures"]
    assert {"auc_stale", "auc_reloaded", "auc_updated", "staleness_s", "auc_gain_over_stale_low"} <= set(figures)
    assert figures["staleness_s"] < 5
    assert figures["num_versions"] == 3
    page = (tmp_path / "demo" / "report.html").read_text()
    assert page.count("<img") == 3
    assert "updated" in done.stdout


def test_a_recipe_out_of_order_says_what_to_run_first(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.publish", "--output", str(tmp_path), "--artifacts", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "run the train recipe" in done.stderr
