"""Many clients at once against a real server: joined, right, refused when full, and forgotten when they leave."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.serving.harness import (
    MODEL,
    Server,
    infer,
    json_request,
    make_batch,
    make_model,
    make_publisher,
    probabilities,
)


@pytest.fixture
def root(tmp_path) -> Path:
    make_publisher(tmp_path).publish_snapshot(make_model().state_dict(), step=0)
    return tmp_path


def test_concurrent_clients_are_joined_and_each_gets_its_own_scores(root) -> None:
    model = make_model()

    def ask(seed: int) -> None:
        client = server.client()
        for turn in range(10):
            batch = make_batch(tuple(range(1, 2 + (seed + turn) % 4)), seed=100 * seed + turn)
            scores, _ = infer(client, batch)
            np.testing.assert_allclose(scores, probabilities(model, batch), atol=1e-6, rtol=0)
        client.close()

    with Server(root, "--num-scorers", "1", "--max-wait-ms", "20", "--max-batch-requests", "8") as server:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(ask, range(6)))
        calls = server.metric('torchrec_adaptive_calls_total{status="200"}')
        passes = server.metric("torchrec_adaptive_calls_per_scoring_count")
        assert calls == server.metric("torchrec_adaptive_calls_per_scoring_sum") == 60
        assert passes < 45
    assert server.exit_code == 0


def test_a_full_server_says_so_and_goes_on(root) -> None:
    batch = make_batch((2,))
    body = json.dumps(json_request(batch)).encode()
    path = f"/v2/models/{MODEL}/infer"
    options = ["--num-scorers", "1", "--max-wait-ms", "1500", "--max-batch-requests", "64", "--max-queued-calls", "3"]
    with Server(root, *options) as server, ThreadPoolExecutor(8) as pool:
        # The queue fills while the first call waits for others; a full queue is scored at once, so that it empties.
        outcomes = list(pool.map(lambda _: server.call("POST", path, body), range(64)))
        statuses = [status for status, _, _ in outcomes]
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) >= 3
        for status, answer, headers in outcomes:
            if status == 503:
                assert "3 calls are waiting" in answer["error"]
                assert headers["retry-after"] == "1"
        assert server.call("POST", path, body)[0] == 200


def test_a_client_that_leaves_is_not_scored(root) -> None:
    body = json.dumps(json_request(make_batch((2,)))).encode()
    with Server(root, "--num-scorers", "1", "--max-wait-ms", "3000") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", f"/v2/models/{MODEL}/infer", body)
        deadline = time.monotonic() + 20
        while server.metric("torchrec_adaptive_queued_calls") < 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert isinstance(connection.sock, socket.socket)
        connection.close()
        while 'torchrec_adaptive_calls_total{status="499"} 1.0' not in server.call("GET", "/metrics")[1]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        passes = server.metric("torchrec_adaptive_calls_per_scoring_count")
        assert passes == 0


def test_a_server_that_ends_answers_what_it_took(root) -> None:
    batch = make_batch((2, 3))
    answered = []
    with Server(root, "--num-scorers", "1", "--max-wait-ms", "60000") as server:
        asking = threading.Thread(target=lambda: answered.append(infer(server.client(), batch)))
        asking.start()
        deadline = time.monotonic() + 20
        while server.metric("torchrec_adaptive_queued_calls") < 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    asking.join(30)
    np.testing.assert_allclose(answered[0][0], probabilities(make_model(), batch), atol=1e-6, rtol=0)
    assert server.exit_code == 0
