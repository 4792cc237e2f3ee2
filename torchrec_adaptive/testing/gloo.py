"""Several gloo ranks on one machine, for tests."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from torch import distributed as dist


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 180.0) -> list[Any]:
    """Run a function on every rank of a gloo group, each in a process of its own.

    Args:
        function: importable by name; called with (rank, world_size, *arguments).
        world_size: how many ranks.
        arguments: passed on; they travel by multiprocessing.
        timeout_s: for the whole run.

    Returns:
        What each rank returned, in the order of the ranks. Return plain values or numpy arrays.

    Raises:
        RuntimeError: a rank failed (with its traceback) or the time ran out; all ranks are ended first.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(sender, store, rank, world_size, timeout_s, function, arguments), daemon=True
            )
            process.start()
            sender.close()
            ranks.append((process, receiver))
        try:
            return _collect([receiver for _, receiver in ranks], timeout_s)
        finally:
            for process, _ in ranks:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()


def _collect(receivers: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        ready = wait_for([r for i, r in enumerate(receivers) if i not in results], timeout=timeout_s)
        if not ready:
            raise RuntimeError(
                f"ranks {sorted(set(range(len(receivers))) - set(results))} gave no result in {timeout_s} s"
            )
        for receiver in ready:
            rank = receivers.index(receiver)  # pyrefly: ignore[bad-argument-type]
            try:
                failed, value = receivers[rank].recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without a result") from None
            if failed:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _run_rank(
    sender: Connection,
    store: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        value = function(rank, world_size, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sender.send((True, traceback.format_exc()))
        return
    sender.send((False, value))
