"""How much do the Triton operators save on a GPU? bfloat16, inference, the serving shape of the IKBO post.

    python -m benchmarks.gpu_broadcast_ops [--quick] [--json FILE]

1024 candidates, 70 a user. The linear compression embedding (lce) is of M=433, dim 256, 1178 tokens of the user and 866
of the candidate; attention is of 8 heads of dim 64 over histories of 1024 events each, so that the peers need no mask.
What each figure compares with, in the same run on the same inputs:

lce_speedup_vs_plain             tokens of the user copied to each candidate, concatenated, one torch.matmul
lce_vs_decomposed                two torch.matmul, the user's at the users' rows, then index_select and a sum
lce_fraction_of_gemm_peak        a torch.matmul of 8192 x 8192 x 8192; only the products that lce needs are counted
attention_speedup_vs_materialised  keys and values copied to each candidate, scaled_dot_product_attention (SDPA)
attention_vs_padded              SDPA with the candidates of a user as padded rows of one query, no copy of keys
attention_vs_nested              SDPA over jagged nested tensors, no padding

A figure above 1 says that ours is faster. All versions of an operator are checked against float32 first, then timed in
turn with CUDA events, the L2 cache overwritten before each; median of 50 (10 with --quick) after 10 rounds of warm-up.
Source of the shape: PyTorch blog "In-Kernel Broadcast Optimization".
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import harness
from torchrec_adaptive.ops.broadcast_attention_triton import broadcast_attention_triton
from torchrec_adaptive.ops.broadcast_linear_triton import broadcast_linear_triton

NUM_CANDIDATES, CANDIDATES_A_USER = 1024, 70
NUM_OUTPUTS, DIM, USER_TOKENS, CANDIDATE_TOKENS = 433, 256, 1178, 866
NUM_HEADS, HEAD_DIM, NUM_EVENTS = 8, 64, 1024
GEMM_SIZE = 8192
FLUSH_BYTES = 1024**3  # more than any L2 cache, and long enough to write that the launches are queued meanwhile
NUM_WARM_UPS, NUM_ROUNDS = 10, 50

Versions = dict[str, Callable[[], Tensor]]


def times_ms(versions: Versions, num_rounds: int) -> dict[str, list[float]]:
    """Time versions of an operator in turn.

    Args:
        versions: name to call.
        num_rounds: timed calls of each, after the warm-up.

    Returns:
        Name to sorted milliseconds.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in versions}
    for number in range(NUM_WARM_UPS + num_rounds):
        for name, call in versions.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            call()
            end.record()
            if number >= NUM_WARM_UPS:
                spans[name].append((start, end))
    torch.cuda.synchronize()
    return {name: sorted(start.elapsed_time(end) for start, end in pairs) for name, pairs in spans.items()}


def measure(operator: str, versions: Versions, num_rounds: int) -> dict[str, float]:
    """Median, p20 and p80 of each version, printed, and the medians returned.

    Args:
        operator: for the print.
        versions: name to call.
        num_rounds: timed calls of each.

    Returns:
        Name to median milliseconds.
    """
    medians = {}
    for name, times in times_ms(versions, num_rounds).items():
        medians[name] = statistics.median(times)
        p20, p80 = times[len(times) // 5], times[len(times) * 4 // 5]
        print(f"{operator:10s} {name:14s} {medians[name]:9.4f} ms  p20 {p20:.4f}  p80 {p80:.4f}")
    return medians


def check(versions: Versions, wanted: Tensor) -> None:
    """Every version within 2% of float32, by root mean square.

    Args:
        versions: name to call.
        wanted: the same product of the same inputs in float32.

    Raises:
        RuntimeError: a version gives something else.
    """
    for name, call in versions.items():
        error = float((call().float() - wanted).norm() / wanted.norm())
        if not error < 0.02:
            raise RuntimeError(f"{name} is {error:.3g} off from float32, the rule is 0.02: its time would mean nothing")


def randn(*shape: int) -> Tensor:
    """Normal bfloat16 on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def linear_figures(index: Tensor, num_users: int, num_rounds: int) -> dict[str, float]:
    """The linear compression embedding.

    Args:
        index: (B,) int32, user of each candidate.
        num_users: R.
        num_rounds: timed calls of each version.

    Returns:
        Figures.
    """
    weight = randn(NUM_OUTPUTS, USER_TOKENS + CANDIDATE_TOKENS) * (USER_TOKENS + CANDIDATE_TOKENS) ** -0.5
    candidate, user = randn(NUM_CANDIDATES, CANDIDATE_TOKENS, DIM), randn(num_users, USER_TOKENS, DIM)
    weight_user, weight_candidate = weight[:, :USER_TOKENS].contiguous(), weight[:, USER_TOKENS:].contiguous()

    def plain(dtype: torch.dtype = torch.bfloat16) -> Tensor:
        tokens = torch.cat([user.to(dtype).index_select(0, index), candidate.to(dtype)], 1)
        return torch.matmul(weight.to(dtype), tokens)

    def decomposed() -> Tensor:
        share = torch.matmul(weight_user, user).index_select(0, index)
        return torch.matmul(weight_candidate, candidate) + share

    versions: Versions = {
        "ours": lambda: broadcast_linear_triton(weight, candidate, user, index),
        "plain": plain,
        "decomposed": decomposed,
    }
    check(versions, plain(torch.float32))
    square, other = randn(GEMM_SIZE, GEMM_SIZE), randn(GEMM_SIZE, GEMM_SIZE)
    medians = measure("lce", versions | {"gemm peak": lambda: torch.matmul(square, other)}, num_rounds)
    num_flops = 2 * NUM_OUTPUTS * DIM * (NUM_CANDIDATES * CANDIDATE_TOKENS + num_users * USER_TOKENS)
    peak_tflops = 2 * GEMM_SIZE**3 / medians["gemm peak"] / 1e9
    lce_tflops = num_flops / medians["ours"] / 1e9
    return {
        "lce_ms": medians["ours"],
        "lce_tflops": lce_tflops,
        "gemm_peak_tflops": peak_tflops,
        "lce_fraction_of_gemm_peak": lce_tflops / peak_tflops,
        "lce_speedup_vs_plain": medians["plain"] / medians["ours"],
        "lce_vs_decomposed": medians["decomposed"] / medians["ours"],
    }


def attention_figures(index: Tensor, num_users: int, num_rounds: int) -> dict[str, float]:
    """Attention of candidates over the history of their user.

    Args:
        index: (B,) int32, user of each candidate.
        num_users: R.
        num_rounds: timed calls of each version.

    Returns:
        Figures.
    """
    query = randn(NUM_CANDIDATES, NUM_HEADS, HEAD_DIM)
    key, value = randn(num_users, NUM_EVENTS, NUM_HEADS, HEAD_DIM), randn(num_users, NUM_EVENTS, NUM_HEADS, HEAD_DIM)
    lengths = torch.full((num_users,), NUM_EVENTS, dtype=torch.int32, device="cuda")
    places = torch.arange(NUM_CANDIDATES, device="cuda") % CANDIDATES_A_USER
    users = index.long()
    starts = torch.arange(num_users + 1, device="cuda")
    candidate_starts, event_starts = (starts * CANDIDATES_A_USER).clamp(max=NUM_CANDIDATES), starts * NUM_EVENTS

    def materialised(dtype: torch.dtype = torch.bfloat16) -> Tensor:
        keys, values = (part.to(dtype).index_select(0, index).transpose(1, 2) for part in (key, value))
        return scaled_dot_product_attention(query.to(dtype).unsqueeze(2), keys, values).squeeze(2)

    def padded() -> Tensor:
        rows = query.new_zeros(num_users, CANDIDATES_A_USER, NUM_HEADS, HEAD_DIM)
        rows[users, places] = query
        out = scaled_dot_product_attention(rows.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return out.transpose(1, 2)[users, places]

    def nested() -> Tensor:
        queries = torch.nested.nested_tensor_from_jagged(
            query, candidate_starts, min_seqlen=1, max_seqlen=CANDIDATES_A_USER
        )
        keys, values = (
            torch.nested.nested_tensor_from_jagged(
                part.flatten(0, 1), event_starts, min_seqlen=NUM_EVENTS, max_seqlen=NUM_EVENTS
            )
            for part in (key, value)
        )
        out = scaled_dot_product_attention(queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2))
        return out.transpose(1, 2).values()

    versions: Versions = {
        "ours": lambda: broadcast_attention_triton(query, key.flatten(0, 1), value.flatten(0, 1), lengths, index)[0],
        "materialised": materialised,
        "padded": padded,
        "nested": nested,
    }
    check(versions, materialised(torch.float32))
    medians = measure("attention", versions, num_rounds)
    num_flops = 4 * NUM_CANDIDATES * NUM_EVENTS * NUM_HEADS * HEAD_DIM
    return {
        "attention_ms": medians["ours"],
        "attention_tflops": num_flops / medians["ours"] / 1e9,
        "attention_speedup_vs_materialised": medians["materialised"] / medians["ours"],
        "attention_vs_padded": medians["padded"] / medians["ours"],
        "attention_vs_nested": medians["nested"] / medians["ours"],
    }


@torch.no_grad()
def run(quick: bool) -> dict[str, float]:
    """Both operators.

    Args:
        quick: 10 rounds in place of 50.

    Returns:
        Figures.
    """
    torch.manual_seed(0)
    num_rounds = 10 if quick else NUM_ROUNDS
    index = (torch.arange(NUM_CANDIDATES, device="cuda") // CANDIDATES_A_USER).int()
    num_users = int(index[-1]) + 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    return linear_figures(index, num_users, num_rounds) | attention_figures(index, num_users, num_rounds)


def main() -> None:
    """Command line."""
    options = harness.parse("How much do the Triton operators save on a GPU?")
    if not torch.cuda.is_available():
        print(
            "gpu_broadcast_ops needs a CUDA device, and PyTorch finds none: run it on a GPU machine.", file=sys.stderr
        )
        sys.exit(2)
    harness.report("gpu_broadcast_ops", run(options.quick), options)


if __name__ == "__main__":
    main()
