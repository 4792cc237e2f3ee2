"""What do the broadcast operators cost, beside the copy that they avoid and beside the floor of the machine?

    python -m benchmarks.broadcast_ops [--quick] [--json FILE]

Linear compression in the shape that FBGEMM's in-kernel broadcast was published with (M=433 output tokens, 1178 tokens
of the user, 866 of the candidate, 70 candidates a user), at 64 floats a token and 256 candidates; attention of 256
candidates, 70 a user, over 512 events of theirs in 4 heads of 64; the factorization machine over 64 tokens of the user
and 16 of the candidate, rank 24.

Peers, all with PyTorch's own operators on the same inputs, checked to be equal first:

| name | what it does |
| --- | --- |
| materialised | copies the user's rows for each candidate, then one product |
| decomposed | a product a side, the user's gathered and added |

The allocator is as PyTorch finds it; `lce_speedup_vs_materialised_kept_memory` is measured after it was told to keep
freed memory, as the server does: the copy then costs its bytes and products, and no page faults.

The floor is the larger of counted FLOPs over the rate of a 2048 x 2048 product and counted bytes over that of a copy,
both measured among the rest.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks import harness, measure
from torchrec_adaptive.ops import broadcast_attention, broadcast_factorization_machine, broadcast_linear
from torchrec_adaptive.ops.broadcast_attention_reference import broadcast_attention_reference
from torchrec_adaptive.ops.broadcast_factorization_machine_reference import broadcast_factorization_machine_reference
from torchrec_adaptive.ops.broadcast_linear_reference import broadcast_linear_reference
from torchrec_adaptive.request import Broadcast
from torchrec_adaptive.serving.memory import keep_freed_memory

NUM_CANDIDATES, CANDIDATES_A_USER, DIM = 256, 70, 64
NUM_OUTPUTS, USER_TOKENS, CANDIDATE_TOKENS = 433, 1178, 866
NUM_HEADS, NUM_EVENTS = 4, 512
MACHINE_USER_TOKENS, MACHINE_CANDIDATE_TOKENS, RANK = 64, 16, 24


def index_of(num_candidates: int, candidates_a_user: int) -> Tensor:
    """(B,) int32: as many candidates a user, the last user with the rest."""
    return (torch.arange(num_candidates) // candidates_a_user).int()


def decomposed_linear(weight_MK: Tensor, candidate_BKD: Tensor, user_RKD: Tensor, index: Tensor) -> Tensor:
    """A product a side, PyTorch's own way."""
    split = user_RKD.shape[1]
    once_RMD = torch.matmul(weight_MK[:, :split], user_RKD)
    return torch.matmul(weight_MK[:, split:], candidate_BKD) + once_RMD.index_select(0, index)


def materialised_attention(query_BHD: Tensor, key_RTHD: Tensor, value_RTHD: Tensor, index: Tensor) -> Tensor:
    """Keys and values copied for each candidate, then PyTorch's attention with one query each."""
    key, value = key_RTHD.index_select(0, index).transpose(1, 2), value_RTHD.index_select(0, index).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(query_BHD.unsqueeze(2), key, value).squeeze(2)


def decomposed_machine(projection_NK: Tensor, candidate_BND: Tensor, user_RND: Tensor, index: Tensor) -> Tensor:
    """Both products a side, PyTorch's own way."""
    split = user_RND.shape[1]
    once_RDK = torch.matmul(user_RND.mT, projection_NK[:split])
    combined_BDK = torch.matmul(candidate_BND.mT, projection_NK[split:]) + once_RDK.index_select(0, index)
    user_rows = torch.matmul(user_RND.index_select(0, index), combined_BDK)
    return torch.cat([user_rows, torch.matmul(candidate_BND, combined_BDK)], dim=1)


def run(options: argparse.Namespace) -> dict[str, float]:
    """All three operators.

    Args:
        options: `quick` for fewer rounds.

    Returns:
        Figures.
    """
    torch.manual_seed(0)
    index = index_of(NUM_CANDIDATES, CANDIDATES_A_USER)
    num_users = int(index[-1]) + 1
    weight = torch.randn(NUM_OUTPUTS, USER_TOKENS + CANDIDATE_TOKENS) / (USER_TOKENS + CANDIDATE_TOKENS) ** 0.5
    candidate = torch.randn(NUM_CANDIDATES, CANDIDATE_TOKENS, DIM)
    user = torch.randn(num_users, USER_TOKENS, DIM)
    query = torch.randn(NUM_CANDIDATES, NUM_HEADS, DIM)
    key, value = torch.randn(2, num_users, NUM_EVENTS, NUM_HEADS, DIM).unbind()
    lengths = torch.full((num_users,), NUM_EVENTS, dtype=torch.int32)
    projection = torch.randn(MACHINE_USER_TOKENS + MACHINE_CANDIDATE_TOKENS, RANK) / 9
    machine_user = torch.randn(num_users, MACHINE_USER_TOKENS, DIM)
    machine_candidate = torch.randn(NUM_CANDIDATES, MACHINE_CANDIDATE_TOKENS, DIM)

    def attention() -> Tensor:
        return broadcast_attention(query, key.flatten(0, 1), value.flatten(0, 1), lengths, index)

    def linear() -> Tensor:
        return broadcast_linear(weight, candidate, Broadcast(user, index))

    def machine() -> Tensor:
        return broadcast_factorization_machine(projection, machine_candidate, Broadcast(machine_user, index))

    limits = measure.Machine()
    functions = {
        "gemm": limits.gemm,
        "copy": limits.copy,
        "lce": linear,
        "lce decomposed": lambda: decomposed_linear(weight, candidate, user, index),
        "lce materialised": lambda: broadcast_linear_reference(weight, candidate, user, index),
        "attention": attention,
        "attention materialised": lambda: materialised_attention(query, key, value, index),
        "fm": machine,
        "fm decomposed": lambda: decomposed_machine(projection, machine_candidate, machine_user, index),
        "fm materialised": lambda: broadcast_factorization_machine_reference(
            projection, machine_candidate, machine_user, index
        ),
    }
    with torch.inference_mode():
        exact, _ = broadcast_attention_reference(query, key.flatten(0, 1), value.flatten(0, 1), lengths, index)
        pairs = {
            "lce": (linear(), functions["lce materialised"]()),
            "attention": (attention(), exact),
            "fm": (machine(), functions["fm materialised"]().mT),  # pyrefly: ignore[missing-attribute]
        }
        for name, (ours, theirs) in pairs.items():
            torch.testing.assert_close(
                ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
    times = measure.interleaved(functions, budget_s=25.0 if options.quick else 120.0)
    measure.show(times)
    flops_per_s, bytes_per_s = limits.flops_per_s(times["gemm"]), limits.bytes_per_s(times["copy"])
    floors = floor_seconds(num_users, flops_per_s, bytes_per_s)
    figures = {"gemm_gflop_per_s": flops_per_s / 1e9, "copy_gb_per_s": bytes_per_s / 1e9}
    for name, floor_s in floors.items():
        ours = times[name].median
        figures[f"{name}_ms"] = ours * 1e3
        figures[f"{name}_speedup_vs_materialised"] = times[f"{name} materialised"].median / ours
        if f"{name} decomposed" in times:
            figures[f"{name}_vs_decomposed"] = times[f"{name} decomposed"].median / ours
        figures[f"{name}_floor_fraction"] = floor_s / ours
    keep_freed_memory()
    kept = measure.interleaved(
        {name: functions[name] for name in ("lce", "lce materialised")}, budget_s=4.0 if options.quick else 20.0
    )
    figures["lce_speedup_vs_materialised_kept_memory"] = kept["lce materialised"].median / kept["lce"].median
    return figures


def floor_seconds(num_users: int, flops_per_s: float, bytes_per_s: float) -> dict[str, float]:
    """The least that each operator could take: what it must multiply, and what it must read and write once."""
    users, candidates = num_users * USER_TOKENS * DIM, NUM_CANDIDATES * CANDIDATE_TOKENS * DIM
    events = num_users * NUM_EVENTS * NUM_HEADS * DIM
    queries = NUM_CANDIDATES * NUM_HEADS * DIM
    tokens = MACHINE_USER_TOKENS + MACHINE_CANDIDATE_TOKENS
    machine_inputs = DIM * (num_users * MACHINE_USER_TOKENS + NUM_CANDIDATES * MACHINE_CANDIDATE_TOKENS)
    counted = {  # (FLOPs, floats)
        "lce": (
            2 * NUM_OUTPUTS * (users + candidates),
            users + candidates + NUM_OUTPUTS * (USER_TOKENS + CANDIDATE_TOKENS) + NUM_CANDIDATES * NUM_OUTPUTS * DIM,
        ),
        "attention": (4 * NUM_EVENTS * queries, 2 * events + 2 * queries),
        "fm": (
            2 * RANK * (machine_inputs + NUM_CANDIDATES * tokens * DIM),
            machine_inputs + tokens * RANK + NUM_CANDIDATES * tokens * RANK,
        ),
    }
    return {name: max(flops / flops_per_s, 4 * floats / bytes_per_s) for name, (flops, floats) in counted.items()}


def main() -> None:
    """Command line."""
    options = harness.parse("What do the broadcast operators cost?", keep_memory=False)
    harness.report("broadcast_ops", run(options), options)


if __name__ == "__main__":
    main()
