"""Numbers of the Triton kernels without a GPU. The interpreter is chosen when Triton is imported, hence the process."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchrec_adaptive.ops.broadcast_attention_triton import broadcast_attention_triton
from torchrec_adaptive.ops.broadcast_factorization_machine_triton import broadcast_factorization_machine_triton
from torchrec_adaptive.ops.broadcast_linear_triton import broadcast_linear_triton

INDEX = torch.zeros(2, dtype=torch.int32)
LENGTHS = torch.tensor([3])
QUERY, EVENTS = torch.ones(2, 2, 4), torch.ones(3, 2, 4)
OWN, SHARED = torch.ones(2, 3, 1), torch.ones(1, 2, 1)


def test_kernels_under_the_interpreter() -> None:
    path = Path(__file__).with_name("interpreted_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=path.parents[3], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), "some were skipped or deselected"


@pytest.mark.parametrize(
    ("operator", "inputs", "named"),
    [
        (broadcast_linear_triton, (torch.ones(3, 4), OWN, SHARED, INDEX), "4 columns"),
        (broadcast_linear_triton, (torch.ones(3, 5), OWN.half(), SHARED, INDEX), "one dtype"),
        (broadcast_factorization_machine_triton, (torch.ones(4, 3), OWN, SHARED, INDEX), "projection has 4 rows"),
        (
            broadcast_factorization_machine_triton,
            (torch.ones(5, 3), OWN, torch.ones(1, 2, 4), INDEX),
            "dim 4, those of the candidate 1",
        ),
        (
            broadcast_factorization_machine_triton,
            (torch.ones(5, 3).double(), OWN.double(), SHARED.double(), INDEX),
            "the kernels take",
        ),
        (broadcast_attention_triton, (QUERY[:, :1], EVENTS, EVENTS, LENGTHS, INDEX), "'query': \\(1, 4\\)"),
        (
            broadcast_attention_triton,
            (torch.ones(2, 1, 300),) + (torch.ones(3, 1, 300),) * 2 + (LENGTHS, INDEX),
            "at most 256",
        ),
        (broadcast_attention_triton, (QUERY, EVENTS, EVENTS[:2], LENGTHS, INDEX), "3 keys and 2 values"),
        (broadcast_attention_triton, (QUERY, EVENTS, EVENTS, LENGTHS, INDEX, torch.ones(3, 1)), "give one logit"),
        (broadcast_attention_triton, (QUERY.half(), EVENTS, EVENTS, LENGTHS, INDEX), "one dtype"),
    ],
)
def test_what_the_kernels_do_not_take(
    operator: Callable[..., object], inputs: tuple[torch.Tensor, ...], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        operator(*inputs)
