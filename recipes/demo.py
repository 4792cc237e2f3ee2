"""The whole path on real ratings: train, publish, serve, then learn while serving.

    make demo

Trains on the first half of MovieLens-100K's timeline, publishes a snapshot and starts three real servers on it: one
that stays stale, one reloaded once in the middle, and one that follows every delta. Then it replays the rest as
traffic: each slice is scored by all three through the stock tritonclient, then learnt, then published as
a delta. Writes report.html and report.json. Hardware: 2 CPU cores, 3 GiB. What to expect: docs/recipes/demo.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import tritonclient.http
from numpy.typing import NDArray

from recipes import movielens_ranker as ranker
from recipes.demo_report import Replay, write_report
from recipes.online import learn_and_publish, slices
from recipes.publish import load_trainer, make_publisher
from recipes.train import TrainRecipe, train
from torchrec_adaptive.datasets import FixedRequests, MovieLens, Requests, load_movielens
from torchrec_adaptive.distributed import process_group
from torchrec_adaptive.publishing import TouchedRows
from torchrec_adaptive.request import RequestBatch
from torchrec_adaptive.serving.protocol import datatype_of
from torchrec_adaptive.serving.tensors import to_tensors

KINDS = ("stale", "reloaded", "updated")


@dataclass(frozen=True)
class DemoRecipe:
    """What to do.

    Args:
        output: folder of the reports; emptied first.
        num_epochs: passes over the past.
        past_fraction: of the timeline.
        num_slices: deltas to publish.
        max_slices: stop after so many; 0 for all.
        max_train_requests: of the past; 0 for all.
        requests_a_call: pages that one call scores.
        candidate_counts: sizes of the latency measurement.
        num_latency_calls: calls of each size.
    """

    output: Path
    num_epochs: int = 2
    past_fraction: float = 0.5
    num_slices: int = 24
    max_slices: int = 0
    max_train_requests: int = 0
    requests_a_call: int = 64
    candidate_counts: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    num_latency_calls: int = 30


@dataclass
class ServerProcess:
    """A server on loopback and a client of it.

    Args:
        artifacts: the folder that it follows.
        log: file for what it prints.
    """

    artifacts: Path
    log: Path
    port: int = 0
    process: subprocess.Popen[str] = field(init=False)

    def __enter__(self) -> ServerProcess:
        command = [sys.executable, "-m", "torchrec_adaptive.serving.server", "--artifacts", str(self.artifacts)]
        command += ["--model", ranker.MODEL_NAME, "--port", "0", "--torch-threads", "1", "--poll-interval-s", "0.1"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ready = threading.Event()
        threading.Thread(target=self._read, args=(ready,), daemon=True).start()
        if not ready.wait(120):
            self.process.kill()
            raise RuntimeError(f"the server did not start; see {self.log}")
        self.client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{self.port}", network_timeout=60)
        return self

    def _read(self, ready: threading.Event) -> None:
        assert self.process.stdout is not None
        with open(self.log, "w") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if match := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
                    self.port = int(match[1])
                    ready.set()

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)

    def score(self, batch: RequestBatch) -> tuple[NDArray[np.float32], int]:
        """Probabilities (B,) and the version that gave them."""
        inputs = []
        for name, array in to_tensors(batch, ranker.schema()).items():
            inputs.append(tritonclient.http.InferInput(name, list(array.shape), datatype_of(array)))
            inputs[-1].set_data_from_numpy(array)
        result = self.client.infer(ranker.MODEL_NAME, inputs)
        return result.as_numpy("liked"), int(result.get_response()["model_version"])

    def version(self) -> int:
        """The version being served."""
        return int(self.client.get_model_metadata(ranker.MODEL_NAME)["versions"][0])

    def wait_for(self, version: int, timeout_s: float = 30.0) -> None:
        """Return when that version is served."""
        deadline = time.monotonic() + timeout_s
        while self.version() < version:
            if time.monotonic() > deadline:
                raise RuntimeError(f"version {version} was not served within {timeout_s} s; see {self.log}")
            time.sleep(0.01)


@contextmanager
def three_servers(output: Path) -> Iterator[dict[str, ServerProcess]]:
    """Stale, reloaded and updated, each with a folder of its own."""
    made = [ServerProcess(output / "artifacts" / kind, output / f"server-{kind}.log") for kind in KINDS]
    with made[0], made[1], made[2]:
        yield dict(zip(KINDS, made, strict=True))


def replay_slice(servers: dict[str, ServerProcess], part: Requests, requests_a_call: int, replay: Replay) -> None:
    """Score a slice on every server, before anyone has learnt from it."""
    source = FixedRequests(part, requests_a_call)
    batches = [source.batch(0, step) for step in range(source.num_steps())]
    for kind, server in servers.items():
        replay.scores[kind].append(np.concatenate([server.score(batch)[0] for batch in batches]))
    replay.labels.append(torch.cat([batch.labels[:, 0] for batch in batches]).numpy())
    replay.users.append(np.repeat(part.users, part.candidate_counts))


def measure_latency(server: ServerProcess, data: MovieLens, recipe: DemoRecipe, replay: Replay) -> None:
    """One request of a well-known user with 1 to 1,024 candidates, over HTTP."""
    random = np.random.default_rng(0)
    users, counts = np.unique(data.user, return_counts=True)
    user = users[counts.argmax()]
    history = np.flatnonzero(data.user == user)[-ranker.MAX_HISTORY_EVENTS :]
    for num_candidates in recipe.candidate_counts:
        candidates = random.integers(0, data.num_ratings, num_candidates)
        batch = data.batch(np.array([user]), candidates, np.array([num_candidates]), history, np.array([len(history)]))
        times = []
        for _ in range(recipe.num_latency_calls):
            started = time.perf_counter()
            server.score(batch)
            times.append(1e3 * (time.perf_counter() - started))
        replay.latency_ms[num_candidates] = (float(np.median(times)), float(np.percentile(times, 95)))


def demo(recipe: DemoRecipe) -> dict[str, float]:
    """Run it.

    Args:
        recipe: what to do.

    Returns:
        The figures of report.json.
    """
    output = recipe.output
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    print("1. train on the first part of the timeline", flush=True)
    train(
        TrainRecipe(
            output,
            recipe.num_epochs,
            recipe.past_fraction,
            max_requests=recipe.max_train_requests,
            num_checkpoint_steps=0,
        )
    )
    data = load_movielens()
    _, present = ranker.past_and_present(recipe.past_fraction, data)
    replay = Replay(KINDS)
    with process_group():
        trainer, touched = load_trainer(output), TouchedRows(ranker.schema())
        publishers = {kind: make_publisher(str(output / "artifacts" / kind), ranker.MODEL_NAME) for kind in KINDS}
        for publisher in publishers.values():
            publisher.publish_snapshot(trainer.weights(), trainer.progress.step)
        print("2. published version 1; three servers load it", flush=True)
        with three_servers(output) as servers:
            print("3. replay the rest: score, learn, publish, update in place", flush=True)
            for number, part in enumerate(slices(present, recipe.num_slices)):
                if recipe.max_slices and number >= recipe.max_slices:
                    break
                replay_slice(servers, part, recipe.requests_a_call, replay)
                manifest = learn_and_publish(trainer, touched, publishers["updated"], part, requests_a_step=128)
                servers["updated"].wait_for(manifest.version)
                replay.delta_bytes.append(sum(entry.num_bytes for entry in manifest.files.values()))
                replay.staleness_s.append(_last_staleness_s(servers["updated"]))
                if number == recipe.num_slices // 2 - 1:
                    reloaded = publishers["reloaded"].publish_snapshot(trainer.weights(), trainer.progress.step)
                    servers["reloaded"].wait_for(reloaded.version)
                    replay.reloaded_after = number
                print(
                    f"   slice {number + 1:2d}: version {manifest.version} live after {replay.staleness_s[-1]:.2f} s",
                    flush=True,
                )
            print("4. measure latency against the number of candidates", flush=True)
            measure_latency(servers["updated"], data, recipe, replay)
    replay.snapshot_bytes = _num_bytes(output / "artifacts" / "stale")
    return write_report(replay, output)


def _last_staleness_s(server: ServerProcess) -> float:
    """From the optimizer step to being served, as the server itself measured it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
        text = response.read().decode()
    found = re.search(r"^torchrec_adaptive_last_update_staleness_seconds (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def main() -> None:
    """Command line."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)  # the batches are small: a second thread costs more than it brings
    parser = argparse.ArgumentParser(description="Train, publish, serve and update in place, on real ratings.")
    parser.add_argument("--output", type=Path, default=Path("build/demo"))
    parser.add_argument("--num-epochs", type=int, default=DemoRecipe.num_epochs)
    parser.add_argument("--num-slices", type=int, default=DemoRecipe.num_slices)
    parser.add_argument("--max-slices", type=int, default=DemoRecipe.max_slices)
    parser.add_argument("--max-train-requests", type=int, default=DemoRecipe.max_train_requests)
    parser.add_argument("--num-latency-calls", type=int, default=DemoRecipe.num_latency_calls)
    demo(DemoRecipe(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
