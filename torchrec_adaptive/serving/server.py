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
from torchrec_adaptive.serving.engine import ScoringEngine
from torchrec_adaptive.serving.follower import Follower
from torchrec_adaptive.serving.metrics import ServingMetrics


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Args:
        arguments: without the program's name; those of the process where none are given.

    Returns:
        The parsed options.
    """
    limits = Limits()
    parser = argparse.ArgumentParser(description="Serve a published ranking model over the Open Inference Protocol v2.")
    parser.add_argument("--artifacts", required=True, help="folder or fsspec URL that versions are published to")
    parser.add_argument("--model", required=True, help="name of the model there")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--poll-interval-s", type=float, default=0.5, help="between two looks at the folder; 0: never")
    parser.add_argument("--max-body-bytes", type=int, default=limits.max_body_bytes)
    parser.add_argument("--max-candidates", type=int, default=limits.max_candidates)
    parser.add_argument("--num-workers", type=int, default=limits.num_workers, help="calls scored at one time")
    parser.add_argument("--torch-threads", type=int, default=0, help="threads of one call; 0 for torch's default")
    return parser.parse_args(arguments)


def serve(options: argparse.Namespace) -> None:
    """Load, follow and answer until the process is asked to stop.

    Args:
        options: as `parse_arguments` gives them.

    Raises:
        ArtifactError: there is no snapshot that can be served.
    """
    if options.torch_threads:
        torch.set_num_threads(options.torch_threads)
    engine = ScoringEngine(ArtifactStore(options.artifacts, options.model), torch.device(options.device))
    metrics = ServingMetrics(engine)
    follower = Follower(engine, options.poll_interval_s, metrics.on_update, metrics.on_refusal)
    if options.poll_interval_s > 0:
        follower.catch_up()
    warm_up(engine)
    limits = Limits(options.max_body_bytes, options.max_candidates, options.num_workers)
    config = uvicorn.Config(create_app(engine, metrics, limits), log_level="warning", timeout_keep_alive=75)
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
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            follower.stop()


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
