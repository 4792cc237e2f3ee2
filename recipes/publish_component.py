"""TorchX component: torchx run -s local_cwd recipes/publish_component.py:publish --output ... --artifacts ...

Plain annotations only: TorchX reads this file's text.
"""

import sys

import torchx.specs as specs


def publish(output: str, artifacts: str, model: str = "movielens", cpu: int = 1, memory_mb: int = 2048) -> specs.AppDef:
    """Publish the newest checkpoint as a snapshot.

    Args:
        output: of the train component
        artifacts: where versions go, a folder or a URL that fsspec knows
        model: name of the model there
        cpu: cores
        memory_mb: memory in MiB
    """
    arguments = ["-m", "recipes.publish", "--output", output, "--artifacts", artifacts, "--model", model]
    resource = specs.Resource(cpu=cpu, gpu=0, memMB=memory_mb)
    role = specs.Role(name="publish", image="", entrypoint=sys.executable, args=arguments, resource=resource)
    return specs.AppDef(name="publish", roles=[role])
