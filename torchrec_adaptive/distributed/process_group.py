"""The process group of a job: one process or several, from the environment that a launcher sets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed as dist


@contextmanager
def process_group(timeout_s: float = 300.0) -> Generator[dist.ProcessGroup]:
    """A process group for the length of a `with` block.

    Under a launcher (torchrun, TorchX: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set) it has all the ranks;
    otherwise it is a world of one and opens no port. NCCL where CUDA is, gloo elsewhere.

    Args:
        timeout_s: after which a collective whose peers are gone fails; without one it would wait for ever.

    Yields:
        The default process group.
    """
    if dist.is_initialized():
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        else:
            store = dist.FileStore(os.path.join(folder, "store"), 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
        try:
            assert dist.group.WORLD is not None
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()
