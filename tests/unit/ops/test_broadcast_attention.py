import math

import pytest
import torch

from torchrec_adaptive.ops import broadcast_attention

# (events of each request, candidates of each request)
SHAPES = [
    ([3], [2]),
    ([0], [3]),
    ([4, 0, 1], [1, 2, 5]),
    ([2, 3, 0], [0, 4, 0]),
    ([5, 1], [0, 0]),
    ([], []),
    ([1, 40], [30, 1]),
]
HEADS, DIM = 2, 3


def inputs_of(events: list[int], candidates: list[int]) -> list[torch.Tensor]:
    """Query, key, value, null key, null value, event logits."""
    shapes = [
        (sum(candidates), HEADS, DIM),
        *[(sum(events), HEADS, DIM)] * 2,
        *[(HEADS, DIM)] * 2,
        (sum(events), HEADS),
    ]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def call(inputs, events: list[int], candidates: list[int], with_logits: bool) -> torch.Tensor:
    query, key, value, null_key, null_value, logits = inputs
    index = torch.repeat_interleave(torch.arange(len(events)), torch.tensor(candidates, dtype=torch.int64)).int()
    lengths = torch.tensor(events, dtype=torch.int32)
    extra = logits if with_logits else None
    return broadcast_attention(query, key, value, lengths, index, null_key, null_value, extra)


def by_loops(inputs, events: list[int], candidates: list[int], with_logits: bool) -> torch.Tensor:
    """One candidate and one head at a time, softmax written out."""
    query, key, value, null_key, null_value, logits = inputs
    out, first_event, number = [], 0, 0
    for num_events, num_candidates in zip(events, candidates):
        seen = range(first_event, first_event + num_events)
        for _ in range(num_candidates):
            heads = []
            for h in range(HEADS):
                scores = [(query[number, h] @ null_key[h]) / math.sqrt(DIM)]
                for t in seen:
                    scores.append(
                        (query[number, h] @ key[t, h]) / math.sqrt(DIM) + (logits[t, h] if with_logits else 0)
                    )
                exponentials = [torch.exp(score) for score in scores]
                values = [null_value[h], *[value[t, h] for t in seen]]
                heads.append(sum(e * v for e, v in zip(exponentials, values)) / sum(exponentials))
            out.append(torch.stack(heads))
            number += 1
        first_event += num_events
    return torch.stack(out) if out else torch.zeros(0, HEADS, DIM, dtype=torch.float64)


@pytest.mark.parametrize("with_logits", [False, True], ids=["plain", "logits"])
@pytest.mark.parametrize(("events", "candidates"), SHAPES, ids=str)
def test_equals_the_written_out_softmax_with_gradients(events, candidates, with_logits: bool) -> None:
    torch.manual_seed(0)
    inputs = inputs_of(events, candidates)
    got, wanted = call(inputs, events, candidates, with_logits), by_loops(inputs, events, candidates, with_logits)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    used = inputs if with_logits else inputs[:-1]
    direction = torch.randn_like(got)
    ours = torch.autograd.grad((got * direction).sum(), used)
    theirs = torch.autograd.grad((wanted * direction).sum() + 0 * sum(x.sum() for x in used), used)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    events, candidates = [2, 0, 1], [1, 1, 2]
    inputs = tuple(inputs_of(events, candidates))
    assert torch.autograd.gradcheck(lambda *given: call(given, events, candidates, True), inputs)


def test_candidates_never_see_each_other() -> None:
    torch.manual_seed(0)
    inputs = inputs_of([3], [4])
    together = call(inputs, [3], [4], True)
    alone = [call([inputs[0][b : b + 1], *inputs[1:]], [3], [1], True) for b in range(4)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_float32_is_near_float64() -> None:
    torch.manual_seed(0)
    events, candidates = [17, 0, 5], [9, 3, 4]
    inputs = inputs_of(events, candidates)
    got = call([x.float() for x in inputs], events, candidates, True)
    torch.testing.assert_close(got.double(), by_loops(inputs, events, candidates, True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("position", "shape", "sentence"),
    [(3, (HEADS, DIM + 1), "make them equal"), (2, (2, HEADS, DIM), "one of each for every event")],
)
def test_shapes_must_agree(position: int, shape: tuple[int, ...], sentence: str) -> None:
    inputs = inputs_of([3], [2])
    inputs[position] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=sentence):
        call(inputs, [3], [2], False)
