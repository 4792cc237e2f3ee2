"""A real server process on loopback, a small published model, and ways to talk to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.http

from torchrec_adaptive.artifact import table_weight_name
from torchrec_adaptive.models import AdaptiveRankingConfig, AdaptiveRankingModel, build_model
from torchrec_adaptive.publishing import Publisher
from torchrec_adaptive.request import Feature, FeatureSchema, RequestBatch, batch_from_rows
from torchrec_adaptive.serving.tensors import to_tensors

MODEL = "ranker"
SCHEMA = FeatureSchema(
    (
        Feature.bag("user", "request", 50, 8, max_length=4),
        Feature.dense("hour", "request", 2),
        Feature.bag("item", "candidate", 30, 8, table="items_table"),
        Feature.bag("tags", "candidate", 20, 8, weighted=True),
        Feature.dense("price", "candidate"),
        Feature.sequence("seen", 30, 8, table="items_table", max_length=10),
        Feature.sequence("action", 4, 8),
    ),
    tasks=("click", "buy"),
)
CONFIG = AdaptiveRankingConfig(token_dim=8, num_layers=2, num_fmb_tokens=2, num_lcb_tokens=2, rank=2, mlp_widths=(16,))
DATATYPES = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}


def make_model(seed: int = 0) -> AdaptiveRankingModel:
    torch.manual_seed(seed)
    return build_model(SCHEMA, CONFIG).eval()


def make_publisher(root: Path) -> Publisher:
    return Publisher(root, MODEL, SCHEMA, CONFIG.to_dict())


def make_batch(counts: tuple[int, ...] = (2, 3), seed: int = 0) -> RequestBatch:
    """Requests with as many candidates as `counts` says."""
    random = np.random.default_rng(seed)
    rows = []
    for request, count in enumerate(counts):
        events = int(random.integers(0, 6))
        shared = {
            "request_id": request,
            "user": [int(random.integers(0, 50))],
            "hour": random.random(2).tolist(),
            "seen": random.integers(0, 30, events).tolist(),
            "action": random.integers(0, 4, events).tolist(),
        }
        for _ in range(count):
            tags = random.integers(0, 20, int(random.integers(0, 3))).tolist()
            rows.append(
                shared
                | {
                    "item": [int(random.integers(0, 30))],
                    "tags": (tags, random.random(len(tags)).tolist()),
                    "price": float(random.random()),
                }
            )
    return batch_from_rows(SCHEMA, rows)


def probabilities(model: AdaptiveRankingModel, batch: RequestBatch) -> np.ndarray:
    with torch.inference_mode():
        return model(batch).sigmoid().numpy()


def change(model: AdaptiveRankingModel, seed: int) -> dict[str, torch.Tensor]:
    """Train a little, by hand: some rows and all dense weights move. Returns the touched rows."""
    generator = torch.Generator().manual_seed(seed)
    weights = model.state_dict()
    touched = {}
    with torch.no_grad():
        for table in SCHEMA.tables:
            ids = torch.randperm(table.num_embeddings, generator=generator)[:4].sort().values
            weights[table_weight_name(table.name)][ids] += torch.randn(4, table.embedding_dim, generator=generator)
            touched[table.name] = ids
        for name, value in weights.items():
            if "embedding_bags" not in name:
                value += 0.05 * torch.randn(value.shape, generator=generator)
    return touched


class Server:
    """A server process, killed by its process id at the end of a `with` block."""

    def __init__(self, root: Path, *options: str) -> None:
        command = [sys.executable, "-m", "torchrec_adaptive.serving.server", "--artifacts", str(root)]
        command += ["--model", MODEL, "--port", "0", "--torch-threads", "1", "--poll-interval-s", "0.05", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._ready.wait(120):
            self.process.kill()
            raise RuntimeError("the server did not become ready:\n" + "".join(self.lines))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(match[1])
                self._ready.set()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)
        self.exit_code = self.process.wait(timeout=30)

    def client(self) -> tritonclient.http.InferenceServerClient:
        return tritonclient.http.InferenceServerClient(f"127.0.0.1:{self.port}", network_timeout=60)

    def call(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple:
        """(status, body as JSON or text, headers) by the standard library's client."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        try:
            return response.status, json.loads(data), dict(response.getheaders())
        except ValueError:
            return response.status, data.decode(errors="replace"), dict(response.getheaders())

    def metric(self, name: str) -> float:
        text = self.call("GET", "/metrics")[1]
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])

    def wait_for_version(self, version: int) -> None:
        deadline = time.monotonic() + 30
        while self.call("GET", f"/v2/models/{MODEL}")[1]["versions"] != [str(version)]:
            assert time.monotonic() < deadline, f"version {version} never came:\n" + "".join(self.lines)
            time.sleep(0.02)


def triton_inputs(batch: RequestBatch) -> list[tritonclient.http.InferInput]:
    inputs = []
    for name, array in to_tensors(batch, SCHEMA).items():
        inputs.append(tritonclient.http.InferInput(name, list(array.shape), DATATYPES[str(array.dtype)]))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def infer(client: tritonclient.http.InferenceServerClient, batch: RequestBatch) -> tuple[np.ndarray, int]:
    """Probabilities (B, tasks) and the version that gave them, by stock tritonclient."""
    result = client.infer(MODEL, triton_inputs(batch))
    columns = [result.as_numpy(task) for task in SCHEMA.tasks]
    return np.stack(columns, axis=1), int(result.get_response()["model_version"])


def json_request(batch: RequestBatch) -> dict[str, Any]:
    """The same call as plain JSON."""
    inputs = [
        {"name": name, "datatype": DATATYPES[str(a.dtype)], "shape": list(a.shape), "data": a.flatten().tolist()}
        for name, a in to_tensors(batch, SCHEMA).items()
    ]
    return {"id": "7", "inputs": inputs}
