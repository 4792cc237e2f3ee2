"""What the Triton kernels share: block sizes, the precision of a product, and the check of dtypes. Loads no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def power_of_two(size: int, least: int, most: int) -> int:
    """The smallest power of two that holds `size`, kept within two others.

    Args:
        size: what a block should hold.
        least: a power of two.
        most: a power of two.

    Returns:
        A block size.

    Example:
        >>> [power_of_two(size, 16, 128) for size in (1, 17, 70, 4000)]
        [16, 32, 128, 128]
    """
    return max(least, min(most, 1 << max(size - 1, 0).bit_length()))


def product_precision(dtype: torch.dtype) -> str:
    """`input_precision` of `tl.dot`: what torch.matmul would use for this dtype under the present setting.

    Args:
        dtype: of the operands.

    Returns:
        "tf32" for float32 where `torch.set_float32_matmul_precision` allows it, else "ieee".
    """
    allowed = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


def check_kernel_dtypes(**tensors: Tensor) -> None:
    """Kernels read operands of one dtype; autocast does not reach into them.

    Args:
        **tensors: the operands by name.

    Raises:
        ValueError: dtypes differ, or are none of float32, bfloat16 and float16.
    """
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"dtypes are {dtypes}; a kernel reads one dtype: cast the operands to it")
    if not set(dtypes.values()) <= set(KERNEL_DTYPES):
        raise ValueError(f"dtypes are {dtypes}; the kernels take {KERNEL_DTYPES}: cast, or use the plain operator")
