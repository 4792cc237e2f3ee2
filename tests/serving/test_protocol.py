"""Stock tritonclient against a real server: health, metadata, and inference in every encoding."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tritonclient.http

from tests.serving.harness import (
    MODEL,
    SCHEMA,
    infer,
    json_request,
    make_batch,
    make_model,
    probabilities,
    triton_inputs,
)
from torchrec_adaptive.serving.protocol import BadRequest
from torchrec_adaptive.serving.tensors import from_tensors, to_tensors


def test_health_and_metadata(served) -> None:
    client = served.client()
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert client.get_server_metadata()["name"] == "torchrec-adaptive"
    metadata = client.get_model_metadata(MODEL)
    assert metadata["versions"] == ["1"]
    assert {"name": "seen.values", "datatype": "INT64", "shape": [-1]} in metadata["inputs"]
    assert {"name": "hour", "datatype": "FP32", "shape": [-1, 2]} in metadata["inputs"]
    assert metadata["outputs"] == [{"name": task, "datatype": "FP32", "shape": [-1]} for task in SCHEMA.tasks]


@pytest.mark.parametrize("counts", [(1,), (2, 3), (5, 1, 4, 7), (40,)])
def test_scores_are_the_models_own(served, counts: tuple[int, ...]) -> None:
    batch = make_batch(counts, seed=len(counts))
    scores, version = infer(served.client(), batch)
    np.testing.assert_allclose(scores, probabilities(make_model(), batch), atol=1e-6, rtol=0)
    assert version == 1


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_bodies(served, algorithm: str) -> None:
    batch = make_batch()
    result = served.client().infer(MODEL, triton_inputs(batch), request_compression_algorithm=algorithm)
    np.testing.assert_allclose(result.as_numpy("buy"), probabilities(make_model(), batch)[:, 1], atol=1e-6)


def test_outputs_are_chosen_and_encoded_as_asked(served) -> None:
    batch = make_batch()
    wanted = [tritonclient.http.InferRequestedOutput("buy", binary_data=False)]
    result = served.client().infer(MODEL, triton_inputs(batch), outputs=wanted, request_id="mine")
    np.testing.assert_allclose(result.as_numpy("buy"), probabilities(make_model(), batch)[:, 1], atol=1e-6)
    assert result.as_numpy("click") is None
    assert result.get_response()["id"] == "mine"


def test_plain_json(served) -> None:
    batch = make_batch()
    status, answer, _ = served.call("POST", f"/v2/models/{MODEL}/infer", json.dumps(json_request(batch)).encode())
    assert status == 200
    scores = np.array([output["data"] for output in answer["outputs"]]).T
    np.testing.assert_allclose(scores, probabilities(make_model(), batch), atol=1e-6)
    assert (answer["id"], answer["model_version"]) == ("7", "1")


def test_short_forms(served) -> None:
    """A bag of one id a row needs no lengths, and one request needs no index."""
    batch = make_batch((3,))
    request = json_request(batch)
    inputs = {entry["name"]: entry for entry in request["inputs"]}
    for name in ("candidate_to_request", "user.lengths", "item.lengths"):
        del inputs[name]
    for name in ("user", "item"):
        inputs[name] = inputs.pop(f"{name}.values") | {"name": name}
    body = json.dumps({"inputs": list(inputs.values())}).encode()
    status, answer, _ = served.call("POST", f"/v2/models/{MODEL}/infer", body)
    assert status == 200, answer
    np.testing.assert_allclose(answer["outputs"][0]["data"], probabilities(make_model(), batch)[:, 0], atol=1e-6)


def test_a_request_without_candidates_is_answered(served) -> None:
    batch = make_batch((2,))
    request = json_request(batch)
    for entry in request["inputs"]:
        if entry["name"].startswith(("item", "tags", "price", "candidate_to_request")):
            entry["shape"][0], entry["data"] = 0, []
    status, answer, _ = served.call("POST", f"/v2/models/{MODEL}/infer", json.dumps(request).encode())
    assert (status, answer["outputs"][0]["shape"]) == (200, [0])


def test_requests_of_very_different_sizes_do_not_fill_the_memory() -> None:
    """Attention lays out requests times the longest history: the product is bounded before anything is allocated."""
    arrays = to_tensors(make_batch((1, 1, 30)), SCHEMA)
    assert from_tensors(arrays, SCHEMA, 100, max_padded_rows=90).num_candidates == 32
    with pytest.raises(BadRequest, match="3 requests, one of them with 30 candidates") as caught:
        from_tensors(arrays, SCHEMA, 100, max_padded_rows=89)
    assert caught.value.status == 413
    arrays = to_tensors(make_batch((1,) * 4), SCHEMA)
    longest = int(arrays["history.lengths"].max())
    assert longest > 1
    with pytest.raises(BadRequest, match=f"4 requests, one of them with {longest} events"):
        from_tensors(arrays, SCHEMA, 100, max_padded_rows=4 * longest - 1)


def test_metrics_count_what_was_done(served) -> None:
    before = served.metric("torchrec_adaptive_candidates_total"), served.metric("torchrec_adaptive_requests_total")
    infer(served.client(), make_batch((2, 3)))
    assert served.metric("torchrec_adaptive_candidates_total") == before[0] + 5
    assert served.metric("torchrec_adaptive_requests_total") == before[1] + 2
    assert served.metric("torchrec_adaptive_model_version") == 1
    assert served.metric("torchrec_adaptive_latency_seconds_count") > 0
    assert served.metric("torchrec_adaptive_staleness_seconds") > 0
