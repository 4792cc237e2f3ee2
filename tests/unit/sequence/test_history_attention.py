import math

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_adaptive.sequence import HistoryAttention, HistoryMean

DIM, EVENT_DIMS, QUERY_DIM = 6, (4, 3), 5
# events and candidates of each request
SHAPES = [([3], [2]), ([0], [2]), ([2, 0, 4], [1, 2, 3]), ([0, 0], [1, 1]), ([2, 1], [0, 0]), ([], [])]


def columns_of(events: list[int]) -> list[JaggedTensor]:
    lengths = torch.tensor(events, dtype=torch.int32)
    return [
        JaggedTensor(torch.randn(sum(events), dim, dtype=torch.float64, requires_grad=True), lengths=lengths)
        for dim in EVENT_DIMS
    ]


def index_of(candidates: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(candidates)), torch.tensor(candidates, dtype=torch.int64)).int()


def attention(recency: bool = False) -> HistoryAttention:
    module = HistoryAttention(sum(EVENT_DIMS), QUERY_DIM, DIM, num_heads=2, recency=recency).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def by_loops(module: HistoryAttention, query: torch.Tensor, columns, events, candidates) -> torch.Tensor:
    """One candidate, one head, one event at a time."""
    event_rows = torch.cat([column.values() for column in columns], dim=1)
    out, number, first = [], 0, 0
    for num_events, num_candidates in zip(events, candidates):
        for _ in range(num_candidates):
            heads = []
            for h in range(2):
                part = slice(h * 3, h * 3 + 3)
                q = (module.query.weight @ query[number])[part]
                scores = [q @ module.null_key_HD[h] / math.sqrt(3)]
                values = [module.null_value_HD[h]]
                for place in range(num_events):
                    event = event_rows[first + place]
                    score = q @ (module.key.weight @ event)[part] / math.sqrt(3)
                    if module.recency_H is not None:
                        score = score + module.recency_H[h] * math.log(num_events - place)
                    scores.append(score)
                    values.append((module.value.weight @ event)[part])
                weights = torch.softmax(torch.stack(scores), 0)
                heads.append(sum(w * v for w, v in zip(weights, values)))
            out.append(module.out.weight @ torch.cat(heads))
            number += 1
        first += num_events
    return torch.stack(out) if out else torch.zeros(0, DIM, dtype=torch.float64)


@pytest.mark.parametrize("recency", [False, True], ids=["plain", "recency"])
@pytest.mark.parametrize(("events", "candidates"), SHAPES, ids=str)
def test_attention_equals_the_formula(events: list[int], candidates: list[int], recency: bool) -> None:
    torch.manual_seed(0)
    module, columns = attention(recency), columns_of(events)
    query = torch.randn(sum(candidates), QUERY_DIM, dtype=torch.float64)
    got = module(query, columns, index_of(candidates))
    torch.testing.assert_close(got, by_loops(module, query, columns, events, candidates), rtol=1e-10, atol=1e-12)
    got.sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name


@pytest.mark.parametrize(("events", "candidates"), SHAPES, ids=str)
def test_mean_is_of_each_requests_own_events(events: list[int], candidates: list[int]) -> None:
    torch.manual_seed(0)
    module, columns = HistoryMean(sum(EVENT_DIMS), DIM).double(), columns_of(events)
    rows = torch.split(torch.cat([column.values() for column in columns], dim=1), events)
    wanted = [
        module.projection.weight @ part.mean(0) if len(part) else torch.zeros(DIM, dtype=torch.float64) for part in rows
    ]
    got = module(columns)
    assert got.shape == (len(events), DIM)
    torch.testing.assert_close(got, torch.stack(wanted) if wanted else got, rtol=1e-10, atol=1e-12)


def test_the_order_of_events_counts_only_with_recency() -> None:
    torch.manual_seed(0)
    columns, query = columns_of([4]), torch.randn(1, QUERY_DIM, dtype=torch.float64)
    turned = [JaggedTensor(column.values().flip(0), lengths=column.lengths()) for column in columns]
    index = index_of([1])
    plain, recent = attention(), attention(recency=True)
    torch.testing.assert_close(plain(query, columns, index), plain(query, turned, index))
    assert not torch.allclose(recent(query, columns, index), recent(query, turned, index))


def test_fresh_recency_is_neutral() -> None:
    torch.manual_seed(0)
    recent = HistoryAttention(sum(EVENT_DIMS), QUERY_DIM, DIM, num_heads=2, recency=True).double()
    plain = HistoryAttention(sum(EVENT_DIMS), QUERY_DIM, DIM, num_heads=2).double()
    plain.load_state_dict({k: v for k, v in recent.state_dict().items() if k != "recency_H"})
    query, columns = torch.randn(3, QUERY_DIM, dtype=torch.float64), columns_of([2, 5])
    torch.testing.assert_close(recent(query, columns, index_of([1, 2])), plain(query, columns, index_of([1, 2])))


def test_a_candidate_learns_from_what_its_user_did_with_the_same_item() -> None:
    """The label is the action of the event with the candidate's own item: no feature but the history tells it."""
    torch.manual_seed(0)
    items, actions = torch.nn.Embedding(20, 8), torch.nn.Embedding(2, 4)
    module, head = HistoryAttention(12, 8, 8, num_heads=2), torch.nn.Linear(8, 1)
    modules = torch.nn.ModuleList([items, actions, module, head])
    optimizer = torch.optim.Adam(modules.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.stack([torch.randperm(20, generator=generator)[:6] for _ in range(64)])
        done = torch.randint(2, (64, 6), generator=generator)
        lengths = torch.full((64,), 6)
        columns = [
            JaggedTensor(table(ids.flatten()), lengths=lengths) for table, ids in ((items, seen), (actions, done))
        ]
        place = torch.randint(6, (64, 1), generator=generator)
        out = module(items(seen.gather(1, place)).squeeze(1), columns, torch.arange(64, dtype=torch.int32))
        return head(out).squeeze(1), done.gather(1, place).squeeze(1).float()

    for _ in range(300):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(*step())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits, labels = step()
    assert float(((logits > 0).float() == labels).float().mean()) > 0.9


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: HistoryAttention(4, 4, 6, 4), "embedding_dim=6 must divide by num_heads=4; use 4"),
        (lambda: HistoryAttention(4, 4, 6, 0), "num_heads=0"),
        (lambda: HistoryMean(4, 4)([]), "at least one"),
        (lambda: HistoryMean(7, 4)([columns_of([2])[0], columns_of([3])[1]]), r"have \[2, 3\] events"),
    ],
)
def test_wrong_sizes_are_refused(build, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build()
