"""Whatever a client sends wrongly gets a 4xx and one sentence, and the server goes on."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.serving.harness import MODEL, infer, json_request, make_batch, make_model, probabilities

PATH = f"/v2/models/{MODEL}/infer"
Change = Callable[[dict[str, Any]], Any]


def put(name: str, **fields: Any) -> Change:
    """Change fields of one input."""

    def change(request: dict[str, Any]) -> None:
        for entry in request["inputs"]:
            if entry["name"] == name:
                entry.update(fields)

    return change


def value(name: str, place: int, new: Any) -> Change:
    """Change one value of one input."""

    def change(request: dict[str, Any]) -> None:
        next(entry for entry in request["inputs"] if entry["name"] == name)["data"][place] = new

    return change


def drop(name: str) -> Change:
    def change(request: dict[str, Any]) -> None:
        request["inputs"] = [entry for entry in request["inputs"] if entry["name"] != name]

    return change


def add(entry: Any) -> Change:
    def change(request: dict[str, Any]) -> None:
        request["inputs"].append(entry)

    return change


def whole(**fields: Any) -> Change:
    def change(request: dict[str, Any]) -> None:
        request.update(fields)

    return change


# Requests of 2 and 3 candidates; the sentence must hold the part given.
CHANGES: list[tuple[str, Change, str]] = [
    ("unknown feature", add({"name": "itme.values", "datatype": "INT64", "shape": [1], "data": [1]}), "item.values"),
    ("missing feature", drop("item.values"), "'item.values' is missing"),
    ("missing lengths", drop("item.lengths"), "'item.lengths' is missing"),
    ("missing dense", drop("hour"), "'hour' is missing"),
    ("missing index", drop("candidate_to_request"), "candidate_to_request is missing"),
    ("missing weights", drop("tags.weights"), "'tags.weights' is missing"),
    ("missing history", drop("history.lengths"), "'history.lengths' is missing"),
    ("input twice", add({"name": "hour", "datatype": "FP32", "shape": [1], "data": [1.0]}), "'hour' comes twice"),
    ("wrong dtype", put("item.values", datatype="INT32"), "is INT32; it must be INT64"),
    ("unknown dtype", put("item.values", datatype="INT65"), "datatype 'INT65'"),
    ("dtype no string", put("item.values", datatype=[]), "has datatype"),
    ("wrong dims", put("hour", shape=[4]), "it must have 2 dims"),
    ("wrong width", put("hour", shape=[4, 1]), "it must be [2, 2]"),
    ("shape too large", put("item.values", shape=[6]), "shape [6] needs 6"),
    ("negative shape", put("item.values", shape=[-5]), "list of numbers of 0 or more"),
    ("huge shape", put("item.values", shape=[2**39, 2**39, 2**39]), "needs"),
    ("shape no list", put("item.values", shape=5), "list of numbers"),
    ("shape of floats", put("item.values", shape=[5.0]), "list of numbers"),
    ("many dims", put("item.values", shape=[1] * 9), "at most 8"),
    ("id past the table", value("item.values", 0, 30), "its table has 30 rows"),
    ("negative id", value("item.values", 0, -1), "holds the id -1"),
    ("id past int64", value("item.values", 0, 2**63), "does not fit"),
    ("float id", value("item.values", 0, 1.5), "'1.5'"),
    ("boolean id", value("item.values", 0, True), "'True'"),
    ("string id", value("item.values", 0, "7"), "'7'"),
    ("null id", value("item.values", 0, None), "'None'"),
    ("negative length", value("item.lengths", 0, -1), "lengths are 0 or more"),
    ("lengths do not sum", value("item.lengths", 0, 2), "sums to 6"),
    ("lengths overflow", put("item.lengths", data=[2**31 - 1] * 5), "sums to"),
    ("too few lengths", put("user.lengths", shape=[1], data=[2]), "it must have 1"),
    ("history too long", put("history.lengths", data=[11, 0]), "sums to 11"),
    ("index unsorted", put("candidate_to_request", data=[0, 1, 0, 1, 1]), "must be sorted"),
    ("index past the end", put("candidate_to_request", data=[0, 0, 1, 1, 2]), "there are 2 requests"),
    ("index negative", put("candidate_to_request", data=[-1, 0, 1, 1, 1]), "holds -1"),
    ("index too short", put("candidate_to_request", shape=[2], data=[0, 1]), "has 2 entries"),
    ("data is no list", put("item.values", data="abc"), "no 'data' list"),
    ("both data and binary", put("item.values", parameters={"binary_data_size": 40}), "both data and binary"),
    ("parameters no object", put("item.values", parameters=3), "must be an object"),
    ("input no object", add(3), "must be an object with a 'name'"),
    ("input without name", add({"datatype": "INT64", "shape": [1], "data": [1]}), "with a 'name'"),
    ("no inputs", whole(inputs=[]), "no 'inputs'"),
    ("inputs no list", whole(inputs={"a": 1}), "no 'inputs'"),
    ("id no string", whole(id=7), "must be a string"),
    ("outputs no list", whole(outputs="click"), "must be a list"),
    ("unknown output", whole(outputs=[{"name": "clik"}]), "the model has click, buy"),
    ("parameters of the call", whole(parameters=[1]), "must be an object"),
]


def one_sentence(answer: Any) -> str:
    assert isinstance(answer, dict), answer
    assert set(answer) == {"error"}
    sentence = answer["error"]
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    assert 10 < len(sentence) < 600
    return sentence


def test_the_unchanged_request_is_right(served) -> None:
    assert served.call("POST", PATH, json.dumps(json_request(make_batch())).encode())[0] == 200


@pytest.mark.parametrize(("change", "part"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_wrong_request_is_refused(served, change: Change, part: str) -> None:
    request = json_request(make_batch())
    change(request)
    status, answer, _ = served.call("POST", PATH, json.dumps(request).encode())
    assert 400 <= status < 500, answer
    assert part in one_sentence(answer)


def raw(text: str) -> bytes:
    return text.encode()


GOOD = raw(json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2]}]}))
BINARY = raw('{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}}]}')
WRONG_SIZE = BINARY.replace(b":8}", b":9}")
BODIES: list[tuple[str, bytes, dict[str, str], int]] = [
    ("empty", b"", {}, 400),
    ("no json", b"nonsense", {}, 400),
    ("no utf-8", b"\xff\xfe{}", {}, 400),
    ("json number", b"3", {}, 400),
    ("NaN", raw('{"inputs":[{"name":"hour","datatype":"FP32","shape":[1],"data":[NaN]}]}'), {}, 400),
    ("infinity", raw('{"inputs":[{"name":"hour","datatype":"FP32","shape":[1],"data":[1e999]}]}'), {}, 400),
    ("deep", b"[" * 40000 + b"]" * 40000, {}, 400),
    (
        "deep data",
        raw('{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":' + "[" * 50 + "]" * 50 + "}]}"),
        {},
        400,
    ),
    ("header length no number", GOOD, {"Inference-Header-Content-Length": "x"}, 400),
    ("header length negative", GOOD, {"Inference-Header-Content-Length": "-5"}, 400),
    ("header length past the body", GOOD, {"Inference-Header-Content-Length": "9999"}, 400),
    ("header length cuts the json", GOOD, {"Inference-Header-Content-Length": "10"}, 400),
    ("binary too short", BINARY + b"1234", {"Inference-Header-Content-Length": str(len(BINARY))}, 400),
    ("binary too long", BINARY + b"0" * 12, {"Inference-Header-Content-Length": str(len(BINARY))}, 400),
    ("binary size wrong", WRONG_SIZE + b"0" * 9, {"Inference-Header-Content-Length": str(len(BINARY))}, 400),
    ("too large", b" " * 100_001, {}, 413),
    ("gzip broken", b"no gzip", {"Content-Encoding": "gzip"}, 400),
    ("gzip cut", gzip.compress(GOOD)[:-12], {"Content-Encoding": "gzip"}, 400),
    ("gzip bomb", gzip.compress(b" " * 50_000_000), {"Content-Encoding": "gzip"}, 413),
    ("unknown encoding", GOOD, {"Content-Encoding": "br"}, 415),
]


@pytest.mark.parametrize(("body", "headers", "wanted"), [b[1:] for b in BODIES], ids=[b[0] for b in BODIES])
def test_a_wrong_body_is_refused(served, body: bytes, headers: dict[str, str], wanted: int) -> None:
    status, answer, _ = served.call("POST", PATH, body, headers)
    one_sentence(answer)
    assert status == wanted, answer


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("POST", "/v2/models/other/infer", 404),
        ("GET", "/v2/models/other", 404),
        ("POST", f"/v2/models/{MODEL}/versions/9/infer", 404),
        ("GET", "/v3/health", 404),
        ("GET", PATH, 405),
        ("DELETE", f"/v2/models/{MODEL}", 405),
    ],
)
def test_a_wrong_path_is_refused(served, method: str, path: str, wanted: int) -> None:
    status, answer, _ = served.call(method, path, b"{}" if method == "POST" else None)
    one_sentence(answer)
    assert status == wanted


def test_too_many_candidates_are_refused(served) -> None:
    status, answer, _ = served.call("POST", PATH, json.dumps(json_request(make_batch((65,)))).encode())
    assert (status, "at most 64" in one_sentence(answer)) == (413, True)


def test_a_body_that_grows_past_the_limit_is_refused(served) -> None:
    """Chunked: no Content-Length says how long it will be."""
    chunk = b"2000\r\n" + b" " * 0x2000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(13):
            connection.sendall(chunk)
        assert b"413" in connection.recv(200).split(b"\r\n")[0]


def test_non_finite_binary_values_are_refused(served) -> None:
    batch = make_batch()
    batch.request_dense[0, 0] = float("nan")
    with pytest.raises(Exception, match="NaN or infinity"):
        infer(served.client(), batch)


@pytest.mark.parametrize("garbage", [b"\x00" * 500, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b""])
def test_garbage_on_the_socket_harms_nobody(served, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(garbage)
    assert served.call("GET", "/v2/health/ready")[0] == 200


def test_the_server_still_answers_rightly(served) -> None:
    assert served.process.poll() is None
    batch = make_batch((4, 4), seed=5)
    scores, _ = infer(served.client(), batch)
    np.testing.assert_allclose(scores, probabilities(make_model(), batch), atol=1e-6)
    assert not [line for line in served.lines if "Traceback" in line]
