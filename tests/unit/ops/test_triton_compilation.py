"""Code of the Triton kernels without a GPU: compiled ahead of time for cards that are not here."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from triton.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources

from tests.unit.ops.compile_only_driver import compile_launches, resource_usage
from torchrec_adaptive.ops.broadcast_attention_triton import (
    AttentionBlocks,
    attention_kernel,
    broadcast_attention_triton,
    request_tiles,
    tiles_kernel,
)
from torchrec_adaptive.ops.broadcast_factorization_machine_triton import (
    broadcast_factorization_machine_triton,
    product_kernel,
)
from torchrec_adaptive.ops.broadcast_linear_triton import broadcast_linear_triton, linear_kernel

H100, H100_SHARED_BYTES = 90, 232448
A100, A100_SHARED_BYTES = 80, 166912
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_CANDIDATES, NUM_REQUESTS = 140, 2  # sizes that the block sizes follow are real ones; rows are few, for they are not


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def index() -> torch.Tensor:
    return torch.arange(NUM_REQUESTS, dtype=torch.int32).repeat_interleave(NUM_CANDIDATES // NUM_REQUESTS)


def linear(dtype: torch.dtype) -> Callable[[], object]:
    """The shape of the IKBO post: M=433, dim 256, 1178 tokens of the user and 866 of the candidate."""
    candidate = torch.empty(NUM_CANDIDATES, 866, 256, dtype=dtype)
    request = torch.empty(NUM_REQUESTS, 1178, 256, dtype=dtype)
    return lambda: broadcast_linear_triton(torch.empty(433, 1178 + 866, dtype=dtype), candidate, request, index())


def machine(dtype: torch.dtype) -> Callable[[], object]:
    candidate = torch.empty(NUM_CANDIDATES, 60, 256, dtype=dtype)
    request = torch.empty(NUM_REQUESTS, 100, 256, dtype=dtype)
    projection = torch.empty(160, 24, dtype=dtype)
    return lambda: broadcast_factorization_machine_triton(projection, candidate, request, index())


def attention(
    dtype: torch.dtype, head_dim: int, with_logits: bool, blocks: AttentionBlocks | None = None
) -> Callable[[], object]:
    query = torch.empty(NUM_CANDIDATES, 4, head_dim, dtype=dtype)
    key, value = torch.empty(2, 500, 4, head_dim, dtype=dtype)
    logits, lengths = torch.empty(500, 4, dtype=dtype) if with_logits else None, torch.tensor([300, 200])
    return lambda: broadcast_attention_triton(query, key, value, lengths, index(), logits, blocks)


def assert_compiled(kernel: CompiledKernel, arch: int, shared_bytes: int) -> None:
    assert f".target sm_{arch}" in kernel.asm["ptx"]
    assert kernel.asm["cubin"].startswith(b"\x7fELF")
    assert kernel.metadata.shared <= shared_bytes
    used = resource_usage(kernel)
    assert used["REG"] * 32 * kernel.metadata.num_warps <= 65536, "more registers than a multiprocessor has"
    assert used["STACK"] <= 32, "registers spill"


def assert_fast(kernel: CompiledKernel, dtype: torch.dtype) -> None:
    ptx = kernel.asm["ptx"]
    assert "cp.async.cg" in ptx, "loads are not ahead of the products"
    if dtype != torch.float32:
        name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
        assert f".f32.{name}.{name}" in ptx, "no tensor-core instruction of this dtype"
        assert "mma.sync" in ptx or "wgmma.mma_async" in ptx


@pytest.mark.parametrize(
    ("arch", "shared_bytes", "dtype"),
    [(A100, A100_SHARED_BYTES, torch.bfloat16), *[(H100, H100_SHARED_BYTES, dtype) for dtype in DTYPES]],
    ids=str,
)
@pytest.mark.parametrize(
    ("operator", "kernels", "num_kernels"),
    [(linear, [linear_kernel], 2), (machine, [linear_kernel, product_kernel], 4)],
    ids=["linear", "machine"],
)
def test_products_with_and_without_a_request(
    operator, kernels, num_kernels: int, arch: int, shared_bytes: int, dtype: torch.dtype
) -> None:
    compiled = compile_launches(operator(dtype), kernels, arch, shared_bytes)
    assert len(compiled) == num_kernels, "each kernel with its optional arguments and without"
    for kernel in compiled:
        assert_compiled(kernel, arch, shared_bytes)
        assert_fast(kernel, dtype)


@pytest.mark.parametrize(
    ("arch", "shared_bytes", "dtype"),
    [(A100, A100_SHARED_BYTES, torch.bfloat16), *[(H100, H100_SHARED_BYTES, dtype) for dtype in DTYPES]],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_with_and_without_logits(head_dim: int, arch: int, shared_bytes: int, dtype: torch.dtype) -> None:
    for with_logits in (False, True):
        call = attention(dtype, head_dim, with_logits)
        (kernel,) = compile_launches(call, [attention_kernel], arch, shared_bytes)
        assert_compiled(kernel, arch, shared_bytes)
        assert_fast(kernel, dtype)


@pytest.mark.parametrize("operator", [linear, lambda dtype: attention(dtype, 64, True)], ids=["linear", "attention"])
def test_a_full_tile_of_bfloat16_uses_warp_group_products(operator) -> None:
    for kernel in compile_launches(
        operator(torch.bfloat16), [linear_kernel, attention_kernel], H100, H100_SHARED_BYTES
    ):
        assert "wgmma.mma_async.sync.aligned" in kernel.asm["ptx"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_tiles(dtype: torch.dtype) -> None:
    call = partial(request_tiles, index().to(dtype), NUM_REQUESTS, 64)
    (kernel,) = compile_launches(call, [tiles_kernel], H100, H100_SHARED_BYTES)
    assert_compiled(kernel, H100, H100_SHARED_BYTES)


def test_sizes_of_one() -> None:
    """Triton makes a constant of an argument that is 1, which is not of the type of the others."""
    one, row, index_of_one = torch.ones(1, 1), torch.ones(1, 1, 1), torch.zeros(1, dtype=torch.int32)

    def call() -> None:
        broadcast_linear_triton(torch.ones(1, 2), row, row, index_of_one)
        broadcast_factorization_machine_triton(torch.ones(2, 1), row, row, index_of_one)
        broadcast_attention_triton(row, row, row, index_of_one, index_of_one, one)

    kernels = [linear_kernel, product_kernel, tiles_kernel, attention_kernel]
    compiled = compile_launches(call, kernels, H100, H100_SHARED_BYTES)
    assert {kernel.name for kernel in compiled} == {kernel.__name__ for kernel in kernels}
    for kernel in compiled:
        assert_compiled(kernel, H100, H100_SHARED_BYTES)


def test_blocks_that_are_too_large_are_refused() -> None:
    blocks = AttentionBlocks(128, 128, num_warps=8, num_stages=3)
    with pytest.raises(OutOfResources, match="shared memory"):
        compile_launches(attention(torch.bfloat16, 256, False, blocks), [attention_kernel], H100, H100_SHARED_BYTES)
