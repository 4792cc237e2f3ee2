"""The Open Inference Protocol v2 over HTTP: tensors out of a request, and into a response.

With the binary tensor data extension, as `tritonclient` uses it: a JSON header, whose length stands in
`Inference-Header-Content-Length`, then the tensors' bytes, in the order of the inputs.
Source: https://github.com/kserve/open-inference-protocol and Triton's extension_binary_data.md.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER_LENGTH = "inference-header-content-length"
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
MAX_DIMS, MAX_INPUTS = 8, 4096


def datatype_of(array: NDArray[Any]) -> str:
    """The protocol's name of an array's dtype.

    Args:
        array: of one of the dtypes of `DTYPES`.

    Example:
        >>> datatype_of(np.zeros(1, dtype=np.int64))
        'INT64'
    """
    return next(name for name, dtype in DTYPES.items() if dtype == array.dtype)


class BadRequest(ValueError):
    """What a client did wrong, in one sentence.

    Args:
        sentence: for the client.
        status: of the HTTP response, 4xx.
    """

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class InferRequest:
    """A decoded request.

    Args:
        inputs: name to array.
        id: the client's, given back.
        outputs: name to whether it is wanted in binary form; None for all of them.
        binary_outputs: whether outputs that say nothing are wanted in binary form.
    """

    inputs: Mapping[str, NDArray[Any]]
    id: str | None = None
    outputs: Mapping[str, bool] | None = None
    binary_outputs: bool = False


def decompress(body: bytes, encoding: str | None, max_bytes: int) -> bytes:
    """Undo the content encoding, within a bound.

    Args:
        body: as it came.
        encoding: value of Content-Encoding.
        max_bytes: of the result.

    Returns:
        The plain body.

    Raises:
        BadRequest: unknown encoding, broken stream, or a result over the bound.
    """
    if encoding in (None, "", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise BadRequest(f"Content-Encoding {encoding[:40]!r} is unknown; use gzip, deflate or none", 415)
    # gzip has its own wrapper; "deflate" is zlib's format, which is what clients send.
    stream = zlib.decompressobj(wbits=31 if encoding == "gzip" else 15)
    try:
        plain = stream.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is no valid {encoding} stream ({error}); compress it again") from None
    if len(plain) > max_bytes:
        raise BadRequest(f"the body is over {max_bytes} bytes when decompressed; send fewer candidates", 413)
    if not stream.eof:
        raise BadRequest(f"the {encoding} stream ends too early; send all of it")
    return plain


def decode_request(body: bytes, header_length: str | None) -> InferRequest:
    """Tensors out of a request's body.

    Args:
        body: not compressed.
        header_length: value of Inference-Header-Content-Length; None where all is JSON.

    Returns:
        The request; binary tensors are views of `body`.

    Raises:
        BadRequest: the message says what to mend.
    """
    json_bytes = len(body)
    if header_length is not None:
        if not header_length.isascii() or not header_length.isdigit() or len(header_length) > 12:
            raise BadRequest(f"Inference-Header-Content-Length is {header_length[:40]!r}; it must be a number of bytes")
        json_bytes = int(header_length)
        if json_bytes > len(body):
            raise BadRequest(f"Inference-Header-Content-Length is {json_bytes}, but the body has {len(body)} bytes")
    raw = _parse_json(body[:json_bytes])
    if not isinstance(raw, dict):
        raise BadRequest(f"the request is a JSON {type(raw).__name__}; it must be an object with 'inputs'")
    inputs = raw.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise BadRequest("the request has no 'inputs'; it must have a list of tensors there")
    if len(inputs) > MAX_INPUTS:
        raise BadRequest(f"the request has {len(inputs)} inputs; at most {MAX_INPUTS} are allowed")
    request_id = raw.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise BadRequest(f"id is {str(request_id)[:40]!r}; it must be a string")
    decoded, position = {}, json_bytes
    for entry in inputs:
        name, array, position = _decode_input(entry, body, position)
        if name in decoded:
            raise BadRequest(f"input {name!r} comes twice; send each once")
        decoded[name] = array
    if position != len(body):
        raise BadRequest(f"{len(body) - position} bytes are left after the last binary input; sizes must add up")
    parameters = raw.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise BadRequest(f"parameters is {str(parameters)[:40]!r}; it must be an object")
    return InferRequest(
        decoded, request_id, _decode_outputs(raw.get("outputs")), bool(parameters.get("binary_data_output"))
    )


def _parse_json(data: bytes) -> Any:
    def refuse(word: str) -> Any:
        raise BadRequest(f"the request holds {word}, which JSON does not allow; every number must be finite")

    try:
        return json.loads(data, parse_constant=refuse)
    except BadRequest:
        raise
    except RecursionError:
        raise BadRequest(
            "the request's JSON is nested too deeply; tensors may be nested as deep as their shape"
        ) from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError among them
        raise BadRequest(
            f"the request is not JSON ({str(error)[:120]}); check Inference-Header-Content-Length"
        ) from None


def _decode_input(entry: Any, body: bytes, position: int) -> tuple[str, NDArray[Any], int]:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise BadRequest(f"an input is {str(entry)[:60]!r}; it must be an object with a 'name'")
    name = entry["name"][:200]
    datatype, shape = entry.get("datatype"), entry.get("shape")
    if not isinstance(datatype, str) or datatype not in DTYPES:
        raise BadRequest(f"input {name!r} has datatype {str(datatype)[:40]!r}; use one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**40 for size in shape
    ):
        raise BadRequest(f"input {name!r} has shape {str(shape)[:60]}; it must be a list of numbers of 0 or more")
    if len(shape) > MAX_DIMS:
        raise BadRequest(f"input {name!r} has {len(shape)} dims; at most {MAX_DIMS} are allowed")
    dtype, count = DTYPES[datatype], math.prod(shape)
    parameters = entry.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise BadRequest(f"parameters of input {name!r} are {str(parameters)[:40]!r}; they must be an object")
    size = parameters.get("binary_data_size")
    if size is None:
        return name, _from_json(name, entry.get("data"), dtype, shape, count), position
    if "data" in entry:
        raise BadRequest(f"input {name!r} has both data and binary_data_size; send one of them")
    if not isinstance(size, int) or isinstance(size, bool) or size != count * dtype.itemsize:
        raise BadRequest(
            f"input {name!r} has binary_data_size {str(size)[:40]}; shape {shape} of {datatype} is "
            f"{count * dtype.itemsize} bytes"
        )
    if position + size > len(body):
        raise BadRequest(f"input {name!r} wants {size} binary bytes, but only {len(body) - position} are left")
    return name, np.frombuffer(body, dtype, count, position).reshape(shape), position + size


def _from_json(name: str, data: Any, dtype: np.dtype[Any], shape: list[int], count: int) -> NDArray[Any]:
    if not isinstance(data, list):
        raise BadRequest(f"input {name!r} has no 'data' list and no binary_data_size; send one of them")
    flat: list[Any] = []
    _flatten(data, flat, 0, name)
    if len(flat) != count:
        raise BadRequest(f"input {name!r} has {len(flat)} values; shape {shape} needs {count}")
    wanted: tuple[type, ...] = (bool,) if dtype.kind == "b" else (int,) if dtype.kind in "iu" else (int, float)
    for value in flat:
        if not isinstance(value, wanted) or (isinstance(value, bool) and dtype.kind != "b"):
            raise BadRequest(f"input {name!r} holds {str(value)[:40]!r}, which is no {dtype.name}")
    try:
        return np.array(flat, dtype=dtype).reshape(shape)
    except OverflowError:
        raise BadRequest(f"input {name!r} holds a number that does not fit into {dtype.name}") from None


def _flatten(data: list[Any], into: list[Any], depth: int, name: str) -> None:
    if depth > MAX_DIMS:
        raise BadRequest(f"data of input {name!r} is nested deeper than {MAX_DIMS} dims")
    for value in data:
        if isinstance(value, list):
            _flatten(value, into, depth + 1, name)
        else:
            into.append(value)


def _decode_outputs(raw: Any) -> dict[str, bool] | None:
    if raw is None:
        return None
    if not isinstance(raw, list):
        raise BadRequest(f"outputs is {str(raw)[:40]!r}; it must be a list of objects with a 'name'")
    wanted = {}
    for entry in raw:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise BadRequest(f"an output is {str(entry)[:60]!r}; it must be an object with a 'name'")
        parameters = entry.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise BadRequest(f"parameters of output {entry['name'][:200]!r} must be an object")
        wanted[entry["name"]] = bool(parameters.get("binary_data"))
    return wanted or None


def encode_response(
    model: str, version: int, request: InferRequest, outputs: Mapping[str, NDArray[np.float32]]
) -> tuple[bytes, dict[str, str]]:
    """A response's body and headers.

    Args:
        model: its name.
        version: that answered.
        request: what was asked.
        outputs: name to float32 array.

    Returns:
        The body, and the headers Content-Type and, with binary tensors, Inference-Header-Content-Length.

    Raises:
        BadRequest: an output that the model does not have was asked for.
    """
    wanted = request.outputs or dict.fromkeys(outputs, request.binary_outputs)
    described, binary = [], []
    for name, as_binary in wanted.items():
        if name not in outputs:
            raise BadRequest(f"output {name[:200]!r} is unknown; the model has {', '.join(outputs)}")
        array = outputs[name]
        entry: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": list(array.shape)}
        if as_binary:
            data = array.astype("<f4", copy=False).tobytes()
            entry["parameters"] = {"binary_data_size": len(data)}
            binary.append(data)
        else:
            entry["data"] = array.flatten().tolist()
        described.append(entry)
    header: dict[str, Any] = {"model_name": model, "model_version": str(version), "outputs": described}
    if request.id is not None:
        header["id"] = request.id
    encoded = json.dumps(header).encode()
    if not binary:
        return encoded, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(encoded))}
    return b"".join([encoded, *binary]), headers
