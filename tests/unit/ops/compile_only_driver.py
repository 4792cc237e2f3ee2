"""Triton without a card: launchers run on CPU tensors, their kernels are compiled for a card, and none is launched."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from triton import JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import CompiledKernel
from triton.runtime import driver


class CompileOnlyDriver(DriverBase):
    """What Triton asks of a driver between a launcher's call and the launch.

    Args:
        arch: compute capability, 90 for an H100 or H200.
        shared_bytes: that a block can have; a kernel with more fails to load, as on the card.
    """

    def __init__(self, arch: int, shared_bytes: int) -> None:
        super().__init__()
        self.target = GPUTarget("cuda", arch, 32)
        self.shared_bytes = shared_bytes
        self.utils = self

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError(ty)

    def get_benchmarker(self) -> Callable[..., Any]:
        raise NotImplementedError

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return f"compile only {id(self)}"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": self.shared_bytes}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: str) -> tuple[None, str, int, int, int]:
        """Module, function, registers, spills, most threads: what Triton keeps of a loaded binary."""
        return None, name, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None


def compile_launches(
    call: Callable[[], object], kernels: Sequence[JITFunction[Any]], arch: int, shared_bytes: int
) -> list[CompiledKernel]:
    """Compile what a call would launch, with the specialisations and block sizes of the launch.

    Args:
        call: runs launchers on CPU tensors; what they return is not computed.
        kernels: the functions to collect.
        arch: compute capability.
        shared_bytes: that a block can have.

    Returns:
        The compiled kernels in the order of `kernels`, and of the first launch.

    Raises:
        OutOfResources: a kernel takes more shared memory.
    """
    previous, compiler = driver._active, CompileOnlyDriver(arch, shared_bytes)
    driver.set_active(compiler)
    try:
        call()
    finally:
        driver._active = previous
    caches = [kernel.device_caches.pop(compiler.get_current_device(), ({},))[0] for kernel in kernels]
    return [compiled for cache in caches for compiled in cache.values()]


def resource_usage(kernel: CompiledKernel) -> dict[str, int]:
    """Registers and stack bytes of a thread, as the cubin has them.

    Args:
        kernel: compiled for CUDA.

    Returns:
        "REG" and "STACK".
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", listed)}
