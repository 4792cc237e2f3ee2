"""TorchX component: torchx run -s local_cwd recipes/serve_component.py:serve --artifacts ...

Plain annotations only: TorchX reads this file's text.
"""

import sys

import torchx.specs as specs


def serve(
    artifacts: str,
    model: str = "movielens",
    host: str = "127.0.0.1",
    port: int = 8000,
    poll_interval_s: float = 0.5,
    torch_threads: int = 1,
    num_scorers: int = 2,
    max_wait_ms: float = 0.0,
    cpu: int = 1,
    memory_mb: int = 2048,
) -> specs.AppDef:
    """Serve a published model over the Open Inference Protocol v2, following new versions.

    Args:
        artifacts: where versions are published
        model: name of the model there
        host: address to listen on
        port: to listen on, 0 for any free one
        poll_interval_s: between two looks for a new version
        torch_threads: threads of one scorer
        num_scorers: passes of the model at one time
        max_wait_ms: that a call may wait for others to be scored with it
        cpu: cores
        memory_mb: memory in MiB
    """
    arguments = ["-m", "torchrec_adaptive.serving.server", "--artifacts", artifacts, "--model", model, "--host", host]
    arguments += ["--port", str(port), "--poll-interval-s", str(poll_interval_s), "--torch-threads", str(torch_threads)]
    arguments += ["--num-scorers", str(num_scorers), "--max-wait-ms", str(max_wait_ms)]
    resource = specs.Resource(cpu=cpu, gpu=0, memMB=memory_mb)
    role = specs.Role(name="serve", image="", entrypoint=sys.executable, args=arguments, resource=resource)
    return specs.AppDef(name="serve", roles=[role])
