"""TorchX component: torchx run -s local_cwd recipes/online_component.py:online --output ... --artifacts ...

Plain annotations only: TorchX reads this file's text.
"""

import sys

import torchx.specs as specs


def online(
    output: str,
    artifacts: str,
    model: str = "movielens",
    num_slices: int = 24,
    max_slices: int = 0,
    pause_s: float = 0.0,
    cpu: int = 1,
    memory_mb: int = 2048,
) -> specs.AppDef:
    """Learn from the rest of the timeline and publish a delta after each slice.

    Args:
        output: of the train component
        artifacts: where the publish component put a snapshot
        model: name of the model there
        num_slices: parts of the timeline's rest
        max_slices: stop after so many, 0 for all
        pause_s: between two slices
        cpu: cores
        memory_mb: memory in MiB
    """
    arguments = ["-m", "recipes.online", "--output", output, "--artifacts", artifacts, "--model", model]
    arguments += ["--num-slices", str(num_slices), "--max-slices", str(max_slices), "--pause-s", str(pause_s)]
    resource = specs.Resource(cpu=cpu, gpu=0, memMB=memory_mb)
    role = specs.Role(name="online", image="", entrypoint=sys.executable, args=arguments, resource=resource)
    return specs.AppDef(name="online", roles=[role])
