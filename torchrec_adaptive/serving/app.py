"""The HTTP side of a server: the Open Inference Protocol v2 on Starlette."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import metadata

import torch
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from torchrec_adaptive.request import RequestBatch
from torchrec_adaptive.serving.batcher import BatcherConfig, MicroBatcher, Overloaded, Scored
from torchrec_adaptive.serving.engine import ScoringEngine
from torchrec_adaptive.serving.metrics import ServingMetrics
from torchrec_adaptive.serving.protocol import (
    HEADER_LENGTH,
    BadRequest,
    InferRequest,
    decode_request,
    decompress,
    encode_response,
)
from torchrec_adaptive.serving.tensors import describe_inputs, from_tensors

SERVER_NAME = "torchrec-adaptive"


@dataclass(frozen=True)
class Limits:
    """What one call may ask for.

    Args:
        max_body_bytes: of a body, also when decompressed.
        max_candidates: over all requests of a call.
        num_workers: calls that are decoded or encoded at one time.
    """

    max_body_bytes: int = 64 * 1024**2
    max_candidates: int = 16_384
    num_workers: int = 2

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_candidates", "num_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")


def create_app(
    engine: ScoringEngine,
    metrics: ServingMetrics,
    limits: Limits | None = None,
    batching: BatcherConfig | None = None,
) -> Starlette:
    """The ASGI application of one engine.

    Args:
        engine: that scores.
        metrics: to count in.
        limits: of a call.
        batching: which calls are scored together, and how many may wait.

    Returns:
        A Starlette application; every error is a JSON object with one sentence under "error". Its `state.batcher` is
        the queue of calls.
    """
    endpoints = _Endpoints(engine, metrics, limits or Limits(), batching or BatcherConfig())
    model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    routes = [
        Route("/v2", endpoints.server_metadata),
        Route("/v2/health/live", endpoints.alive),
        Route("/v2/health/ready", endpoints.ready),
        Route("/metrics", endpoints.prometheus),
    ]
    for prefix in (model, version):
        routes += [
            Route(prefix, endpoints.model_metadata),
            Route(f"{prefix}/ready", endpoints.model_ready),
            Route(f"{prefix}/infer", endpoints.infer, methods=["POST"]),
        ]
    handlers = {HTTPException: _http_error, BadRequest: _bad_request, Overloaded: _overloaded}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=endpoints.lifespan)
    app.state.batcher = endpoints.batcher
    app.router.redirect_slashes = False
    return app


class _Endpoints:
    def __init__(self, engine: ScoringEngine, metrics: ServingMetrics, limits: Limits, batching: BatcherConfig) -> None:
        self.engine, self.metrics, self.limits = engine, metrics, limits
        self.pool = ThreadPoolExecutor(limits.num_workers, thread_name_prefix="codec")
        self.batcher = MicroBatcher(engine, batching, metrics)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        """Of the application: at its end the calls that were taken are scored."""
        yield
        await asyncio.to_thread(self.batcher.close)
        self.pool.shutdown()

    async def alive(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        return JSONResponse({"ready": self.engine.live.version > 0})

    async def prometheus(self, request: Request) -> Response:
        return Response(self.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def server_metadata(self, request: Request) -> Response:
        version = metadata.version("torchrec-adaptive")
        return JSONResponse({"name": SERVER_NAME, "version": version, "extensions": ["binary_tensor_data"]})

    async def model_metadata(self, request: Request) -> Response:
        self._check_model(request)
        schema = self.engine.schema
        outputs = [{"name": task, "datatype": "FP32", "shape": [-1]} for task in schema.tasks]
        return JSONResponse(
            {
                "name": self.engine.store.model,
                "versions": [str(self.engine.live.version)],
                "platform": "torchrec_adaptive",
                "inputs": describe_inputs(schema),
                "outputs": outputs,
            }
        )

    async def model_ready(self, request: Request) -> Response:
        self._check_model(request)
        return JSONResponse({"name": self.engine.store.model, "ready": True})

    async def infer(self, request: Request) -> Response:
        started = time.perf_counter()
        status = 500
        try:
            response = await self._infer(request)
            status = response.status_code
            return response
        except BadRequest as error:
            status = error.status
            raise
        except Overloaded:
            status = 503
            raise
        except ClientDisconnect:
            status = 499
            return Response(status_code=400)
        finally:
            self.metrics.calls.labels(str(status)).inc()
            self.metrics.latency_s.observe(time.perf_counter() - started)

    async def _infer(self, request: Request) -> Response:
        self._check_model(request)
        body = await self._body(request)
        loop = asyncio.get_running_loop()
        header_length = request.headers.get(HEADER_LENGTH)
        encoding = request.headers.get("content-encoding")
        asked, batch = await loop.run_in_executor(self.pool, self._decode, body, encoding, header_length)
        scored = await _wanted(request, self.batcher.submit(batch))
        content, headers = await loop.run_in_executor(self.pool, self._encode, asked, scored)
        self.metrics.requests.inc(batch.num_requests)
        self.metrics.candidates.inc(batch.num_candidates)
        return Response(content, headers=headers)

    def _decode(
        self, body: bytes, encoding: str | None, header_length: str | None
    ) -> tuple[InferRequest, RequestBatch]:
        body = decompress(body, encoding, self.limits.max_body_bytes)
        asked = decode_request(body, header_length)
        return asked, from_tensors(asked.inputs, self.engine.schema, self.limits.max_candidates)

    def _encode(self, asked: InferRequest, scored: Scored) -> tuple[bytes, dict[str, str]]:
        columns = scored.probabilities.numpy()
        outputs = {task: columns[:, column] for column, task in enumerate(self.engine.schema.tasks)}
        return encode_response(self.engine.store.model, scored.version, asked, outputs)

    def _check_model(self, request: Request) -> None:
        name, version = request.path_params["model"], request.path_params.get("version")
        if name != self.engine.store.model:
            raise BadRequest(f"model {name[:100]!r} is not served here; {self.engine.store.model!r} is", 404)
        if version is not None and version != str(self.engine.live.version):
            raise BadRequest(
                f"version {version[:40]!r} is not the one being served, which is {self.engine.live.version}; leave the "
                "version out to get whichever is live",
                404,
            )

    async def _body(self, request: Request) -> bytes:
        limit = self.limits.max_body_bytes
        sentence = f"the body is over {limit} bytes; send fewer candidates in a call"
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise BadRequest(sentence, 413)
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise BadRequest(sentence, 413)
            chunks.append(chunk)
        return b"".join(chunks)


async def _wanted(request: Request, future: Future[Scored]) -> Scored:
    """What the future gives; where the client leaves before that, it is cancelled and ClientDisconnect is raised."""
    scored = asyncio.wrap_future(future)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({scored, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not scored.done():
            raise ClientDisconnect
        return scored.result()
    finally:
        scored.cancel()
        gone.cancel()


async def _disconnect(request: Request) -> None:
    """Returns when the client has left; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _overloaded(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=503, headers={"Retry-After": "1"})


async def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return JSONResponse({"error": str(error)}, status_code=error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = f"{request.method} {request.url.path[:200]}: {error.detail}; the paths are those of the protocol's v2"
    return JSONResponse({"error": sentence}, status_code=error.status_code, headers=error.headers)


def warm_up(engine: ScoringEngine) -> None:
    """Score one request without candidates, so that no client pays for first-time set-up.

    Args:
        engine: to warm.
    """
    schema = engine.schema
    empty = {"candidate_to_request": torch.zeros(0, dtype=torch.int32).numpy()}
    for entry in describe_inputs(schema):
        shape = [0 if size < 0 else size for size in entry["shape"]]
        dtype = {"INT32": torch.int32, "INT64": torch.int64, "FP32": torch.float32}[entry["datatype"]]
        empty[entry["name"]] = torch.zeros(shape, dtype=dtype).numpy()
    engine.score(from_tensors(empty, schema, max_candidates=1))
