"""The server process: python -m torchrec_adaptive.serving.server --artifacts FOLDER --model NAME.

It loads the newest snapshot and the deltas after it, answers the Open Inference Protocol v2, and follows the folder:
each new version is taken in place. It prints one line when it is ready, and ends cleanly on SIGTERM.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Sequence

import torch
import uvicorn

from torchrec_adaptive.artifact import ArtifactError, ArtifactStore
from torchrec_adaptive.serving.app import Limits, create_app, warm_up
from torchrec_adaptive.serving.batcher import BatcherConfig, MicroBatcher
from torchrec_adaptive.serving.engine import ScoringEngine
from torchrec_adaptive.serving.follower import Follower
from torchrec_adaptive.serving.memory import keep_freed_memory
from torchrec_adaptive.serving.metrics import ServingMetrics


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Args:
        arguments: without the program's name; those of the process where none are given.

    Returns:
        The parsed options.
    """
    limits, batching = Limits(), BatcherConfig()
    parser = argparse.ArgumentParser(description="Serve a published ranking model over the Open Inference Protocol v2.")
    parser.add_argument("--artifacts", required=True, help="folder or fsspec URL that versions are published to")
    parser.add_argument("--model", required=True, help="name of the model there")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--poll-interval-s", type=float, default=0.5, help="between two looks at the folder; 0: never")
    parser.add_argument("--max-body-bytes", type=int, default=limits.max_body_bytes)
    parser.add_argument("--max-candidates", type=int, default=limits.max_candidates)
    parser.add_argument("--num-workers", type=int, default=limits.num_workers, help="calls decoded at one time")
    parser.add_argument("--torch-threads", type=int, default=0, help="threads of one scorer; 0 for torch's default")
    group = parser.add_argument_group("calls that are scored together")
    group.add_argument("--num-scorers", type=int, default=batching.num_scorers, help="passes of the model at one time")
    group.add_argument(
        "--max-wait-ms", type=float, default=batching.max_wait_ms, help="a call's, for others; 0 joins what has queued"
    )
    group.add_argument("--max-batch-requests", type=int, default=batching.max_requests, help="1 joins none")
    group.add_argument("--max-batch-candidates", type=int, default=batching.max_candidates)
    group.add_argument(
        "--max-queued-calls", type=int, default=batching.max_queued, help="one more is answered with status 503"
    )
    return parser.parse_args(arguments)


def serve(options: argparse.Namespace) -> None:
    """Load, follow and answer until the process is asked to stop.

    Args:
        options: as `parse_arguments` gives them.

    Raises:
        ArtifactError: there is no snapshot that can be served.
    """
    limits = Limits(options.max_body_bytes, options.max_candidates, options.num_workers)
    batching = BatcherConfig(
        options.max_wait_ms,
        options.max_batch_requests,
        options.max_batch_candidates,
        max_queued=options.max_queued_calls,
        num_scorers=options.num_scorers,
    )
    keep_freed_memory()
    if options.torch_threads:
        torch.set_num_threads(options.torch_threads)
    engine = ScoringEngine(ArtifactStore(options.artifacts, options.model), torch.device(options.device))
    metrics = ServingMetrics(engine)
    follower = Follower(engine, options.poll_interval_s, metrics.on_update, metrics.on_refusal)
    if options.poll_interval_s > 0:
        follower.catch_up()
    warm_up(engine)
    app = create_app(engine, metrics, limits, batching)
    config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=75)
    with socket.create_server((options.host, options.port)) as listener:
        port = listener.getsockname()[1]
        if options.poll_interval_s > 0:
            follower.start()
        print(
            f"serving {options.model} version {engine.live.version} on http://{options.host}:{port}",
            flush=True,
        )
        # uvicorn ends gracefully on SIGTERM, then raises the signal once more: by then there is nothing left to end.
        signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            _Server(config, app.state.batcher).run(sockets=[listener])
        finally:
            follower.stop()


class _Server(uvicorn.Server):
    """At its end it waits for the calls that it took, and those wait for no others."""

    def __init__(self, config: uvicorn.Config, batcher: MicroBatcher) -> None:
        super().__init__(config)
        self._batcher = batcher

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._batcher.hurry()
        await super().shutdown(sockets)


def main() -> None:
    """Entry point: one sentence and exit code 2 where nothing can be served."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        serve(parse_arguments())
    except (ArtifactError, ValueError, OSError) as error:
        print(f"can't serve: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
