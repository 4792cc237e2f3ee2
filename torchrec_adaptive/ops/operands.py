"""What every operator does with its operands first: check them, and give them one dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_adaptive.request import check_candidate_to_request


def check_sides(index: Tensor, num_candidates: int, num_requests: int, **operands: Tensor | None) -> None:
    """Refuse operands of several devices, and an index that does not fit them.

    The index's values are read on the CPU only: on a GPU that would wait for the device, and `RequestBatch.validate`
    has seen them before they went there.

    Args:
        index: (B,) integer, `candidate_to_request`.
        num_candidates: B, rows of the candidate's operands.
        num_requests: R, rows of the request's.
        **operands: all others, by name.

    Raises:
        ValueError: mixed devices, another number of candidates, or an unsorted or out-of-range index.
    """
    devices = {name: str(tensor.device) for name, tensor in operands.items() if tensor is not None}
    devices["candidate_to_request"] = str(index.device)
    if len(set(devices.values())) > 1:
        raise ValueError(f"operands lie on different devices, {devices}; move them to one with `to`")
    if index.shape != (num_candidates,):
        raise ValueError(
            f"candidate_to_request has shape {tuple(index.shape)}, but there are {num_candidates} candidates; give one "
            "entry a candidate"
        )
    if index.device.type == "cpu" and not torch.compiler.is_compiling():
        check_candidate_to_request(index, num_requests)


def one_dtype(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands in the dtype that autocast wants where it is on, else in the widest of theirs.

    Args:
        *operands: floats.

    Returns:
        The operands; a cast is a differentiable copy.
    """
    device = operands[0].device.type
    if torch.is_autocast_enabled(device) and all(x.dtype != torch.float64 for x in operands):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = operands[0].dtype
        for operand in operands[1:]:
            dtype = torch.promote_types(dtype, operand.dtype)
    return tuple(operand.to(dtype) for operand in operands)


def plain_region(operand: Tensor) -> torch.autocast:
    """Where an operator runs: its operands have their dtype already, and autocast must not reach into it.

    Args:
        operand: any of them.

    Returns:
        A context manager.
    """
    return torch.autocast(operand.device.type, enabled=False)


def left_product(weight_MK: Tensor, tokens_BKD: Tensor) -> Tensor:
    """A matrix on the left of many: `matmul` for autograd, which folds and so copies, and without a copy in inference.

    Args:
        weight_MK: (M, K) floats.
        tokens_BKD: (B, K, D).

    Returns:
        (B, M, D).
    """
    if torch.is_grad_enabled() or tokens_BKD.dim() != 3 or torch.is_autocast_enabled(tokens_BKD.device.type):
        return torch.matmul(weight_MK, tokens_BKD)
    return torch.bmm(weight_MK.expand(tokens_BKD.shape[0], *weight_MK.shape), tokens_BKD)
