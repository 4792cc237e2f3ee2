"""TorchX component: torchx run -s local_cwd recipes/train_component.py:train --output build/recipe

Plain annotations only: TorchX reads this file's text.
"""

import torchx.specs as specs
from torchx.components import dist


def train(
    output: str,
    num_epochs: int = 2,
    num_ranks: int = 1,
    max_requests: int = 0,
    num_checkpoint_steps: int = 100,
    cpu: int = 2,
    gpu: int = 0,
    memory_mb: int = 4096,
) -> specs.AppDef:
    """Train the MovieLens ranker on the first part of the timeline.

    Args:
        output: folder for checkpoints, TensorBoard scalars and metrics
        num_epochs: passes over the past
        num_ranks: processes on this host
        max_requests: of the past, its last ones; 0 for all
        num_checkpoint_steps: between two checkpoints
        cpu: cores
        gpu: cards
        memory_mb: memory in MiB
    """
    return dist.ddp(
        "--output",
        output,
        "--num-epochs",
        str(num_epochs),
        "--max-requests",
        str(max_requests),
        "--num-checkpoint-steps",
        str(num_checkpoint_steps),
        m="recipes.train",
        name="train",
        j=f"1x{num_ranks}",
        cpu=cpu,
        gpu=gpu,
        memMB=memory_mb,
    )
