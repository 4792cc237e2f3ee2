"""What is said of the ratings around a candidate, against a loop; and that no held-out rating is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from torchrec_adaptive.datasets import RandomSplitTraining, load_movielens, movielens_schema, random_split
from torchrec_adaptive.datasets.movielens_nearby import NEIGHBOURS, NUM_NEARBY, WINDOWS_S, nearby_ratings, usual_ratings


def by_a_loop(asked_s: int, events: list[tuple[int, float]]) -> list[float]:
    """One candidate's row; `events` are (timestamp, above) in the order of time."""
    mean = sum(above for _, above in events) / (len(events) + 2)

    def over(chosen: list[tuple[int, float]]) -> float:
        return (sum(above for _, above in chosen) + 2 * mean) / (len(chosen) + 2) - mean

    before = [event for event in events if event[0] < asked_s]
    after = [event for event in events if event[0] > asked_s]
    row = [mean, *(over([event for event in events if abs(event[0] - asked_s) <= window_s]) for window_s in WINDOWS_S)]
    for count in NEIGHBOURS:
        row += [over(before[-count:]), over(after[:count])]
    now = len(events) - len(before) - len(after)
    place = (len(before) + 0.5 * now) / max(1, len(events))
    return [
        *row,
        np.log1p(len(events)) / 5,
        place,
        np.log1p(len(before)) / 5,
        np.log1p(len(after)) / 5,
    ]


@pytest.mark.parametrize("seed", range(3))
def test_nearby_ratings_equal_a_loop_over_pairs(seed: int) -> None:
    random = np.random.default_rng(seed)
    asked_counts, event_counts = random.integers(1, 5, 12), random.integers(0, 9, 12)
    event_counts[[0, 5, 11]] = 0
    asked_s = random.choice([0, 30, 31, 90, 400, 4000, 90_000], asked_counts.sum())
    event_s = random.choice([0, 30, 31, 90, 400, 4000, 90_000], event_counts.sum())
    above = np.arange(event_counts.sum()) % 7 * 0.5 - 1.5
    for request, begin in enumerate(np.cumsum(event_counts) - event_counts):  # at one second, the order must not count
        part = slice(begin, begin + event_counts[request])
        above[part] = event_s[part] % 11 * 0.3 - 1.0
    rows = nearby_ratings(asked_s, asked_counts, event_s, above, event_counts)
    assert rows.shape == (asked_counts.sum(), NUM_NEARBY)
    owner = np.repeat(np.arange(12), asked_counts)
    begins = np.cumsum(event_counts) - event_counts
    for number, request in enumerate(owner):
        part = slice(begins[request], begins[request] + event_counts[request])
        events = sorted(zip(event_s[part].tolist(), above[part].tolist(), strict=True))
        np.testing.assert_allclose(rows[number], by_a_loop(int(asked_s[number]), events), atol=1e-6)


def test_a_usual_rating_is_drawn_to_the_mean_of_all() -> None:
    usual = usual_ratings(np.array([0] * 100 + [1]), np.array([5] * 100 + [1]), 3)
    mean = 501 / 101
    assert usual[2] == pytest.approx(mean)
    assert usual[1] == pytest.approx(mean + (1 - mean) / 6)
    assert abs(usual[0] - 5) < abs(mean - 5)


def test_held_out_ratings_change_no_input() -> None:
    data = load_movielens()
    rows, valid, test = random_split(data, seed=0, nearby=True)
    held_out = np.setdiff1d(np.arange(data.num_ratings), rows)
    other = data.rating.copy()
    other[held_out] = 6 - other[held_out]
    _, changed_valid, changed_test = random_split(replace(data, rating=other), seed=0, nearby=True)
    train = RandomSplitTraining(valid.data, rows, seed=0).batch(0, 0)
    train.validate(movielens_schema(8, nearby=True))
    again = RandomSplitTraining(changed_valid.data, rows, seed=0).batch(0, 0)
    assert train.candidate_dense.equal(again.candidate_dense)
    chosen = np.arange(0, 900, 30)
    for before, after in ((valid, changed_valid), (test, changed_test)):
        one, two = before.take(chosen), after.take(chosen)
        assert one.candidate_dense.equal(two.candidate_dense)
        assert one.features.history.values().equal(two.features.history.values())
        assert not one.labels.equal(two.labels)


def test_a_candidate_s_own_rating_changes_none_of_its_inputs() -> None:
    data = load_movielens()
    rows, valid, _ = random_split(data, seed=0, nearby=True)
    source = RandomSplitTraining(valid.data, rows, seed=0, requests_a_step=1)
    batch = source.batch(0, 0)
    requests, order = source._requests(0)
    first = int((np.cumsum(requests.candidate_counts) - requests.candidate_counts)[order[0]])
    own = requests.candidates[first]
    other = data.rating.copy()
    other[own] = 6 - other[own] if other[own] != 3 else 5
    _, changed, _ = random_split(replace(data, rating=other), seed=0, nearby=True)
    again = RandomSplitTraining(changed.data, rows, seed=0, requests_a_step=1).batch(0, 0)
    assert not batch.labels[0].equal(again.labels[0])
    # what remains of it is one 80,000th of the mean of all ratings
    assert (batch.candidate_dense[0] - again.candidate_dense[0]).abs().max() < 1e-4
