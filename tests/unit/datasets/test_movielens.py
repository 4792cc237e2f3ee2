"""The real files: their published counts, and no example that knows its own future."""

from __future__ import annotations

import numpy as np
import pytest

from torchrec_adaptive.datasets import (
    FixedRequests,
    RandomSplitTraining,
    Requests,
    load_movielens,
    movielens_folder,
    movielens_schema,
    random_split,
    slice_requests,
    timeline,
)


@pytest.fixture(scope="module")
def data():
    return load_movielens()


def events_of(requests: Requests, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows asked for and rows known of one request."""
    asked = np.cumsum(requests.candidate_counts) - requests.candidate_counts
    known = np.cumsum(requests.history_lengths) - requests.history_lengths
    return (
        requests.candidates[asked[number] : asked[number] + requests.candidate_counts[number]],
        requests.histories[known[number] : known[number] + requests.history_lengths[number]],
    )


def test_the_files_are_the_published_ones(data) -> None:
    assert data.num_ratings == 100_000
    assert (len(np.unique(data.user)), len(np.unique(data.item))) == (943, 1682)
    assert (data.rating >= 4).mean() == pytest.approx(0.5538, abs=5e-5)
    assert timeline(data).num_requests == 49_439
    toy_story = data.genres[data.genre_offsets[1] : data.genre_offsets[2]]
    assert len(toy_story) == 3


def test_batches_fit_the_schema_and_hold_the_right_rows(data) -> None:
    schema, pages = movielens_schema(8), timeline(data, max_history=50)
    batch = pages.take(np.array([20_000, 7, 41_000]))
    batch.validate(schema)
    asked, known = events_of(pages, 20_000)
    assert batch.features.candidate["item_id"].values()[: len(asked)].tolist() == data.item[asked].tolist()
    assert batch.features.history["seen_item"].values()[: len(known)].tolist() == data.item[known].tolist()
    assert batch.labels[: len(asked), 0].tolist() == (data.rating[asked] >= 4).astype(float).tolist()


def test_the_timeline_never_knows_the_present(data) -> None:
    pages = timeline(data, max_history=200)
    assert np.sort(pages.candidates).tolist() == list(range(100_000))
    page_time = data.timestamp_s[pages.candidates][np.cumsum(pages.candidate_counts) - 1]
    assert (np.diff(page_time) >= 0).all()
    owner = np.repeat(np.arange(pages.num_requests), pages.history_lengths)
    assert (data.timestamp_s[pages.histories] < page_time[owner]).all()
    assert (data.user[pages.histories] == pages.users[owner]).all()
    assert pages.history_lengths.max() == 200
    for number in (100, 30_000):
        _, known = events_of(pages, number)
        before = np.flatnonzero((data.user == pages.users[number]) & (data.timestamp_s < page_time[number]))
        assert len(known) == min(200, len(before))


def test_the_random_split_keeps_its_parts_apart(data) -> None:
    train, valid, test = random_split(data, seed=1)
    parts = [set(train.tolist()), set(valid.candidates.tolist()), set(test.candidates.tolist())]
    assert [len(part) for part in parts] == [80_000, 10_000, 10_000]
    assert len(set.union(*parts)) == 100_000
    assert set(valid.histories.tolist()) <= parts[0]
    assert set(test.histories.tolist()) <= parts[0]
    assert set(random_split(data, seed=2)[0].tolist()) != parts[0]


def test_a_training_rating_is_asked_for_once_and_never_in_its_own_history(data) -> None:
    rows, _, _ = random_split(data, seed=0)
    source = RandomSplitTraining(data, rows, seed=0, num_folds=5)
    requests, _ = source._requests(3)
    assert source.num_requests == requests.num_requests
    assert np.sort(requests.candidates).tolist() == np.sort(rows).tolist()
    assert set(requests.histories.tolist()) <= set(rows.tolist())
    for number in range(0, requests.num_requests, 97):
        asked, known = events_of(requests, number)
        assert not set(asked.tolist()) & set(known.tolist())


def test_batches_are_a_function_of_their_number_and_ranks_share_them(data) -> None:
    rows, _, _ = random_split(data, seed=0)
    first, again = (RandomSplitTraining(data, rows, seed=4) for _ in range(2))
    again.batch(7, 2)
    wanted = first.batch(1, 5)
    assert again.batch(1, 5).labels.tolist() == wanted.labels.tolist()
    shares = [first.batch(1, 5, rank, 2) for rank in range(2)]
    assert sum(share.num_requests for share in shares) == wanted.num_requests
    assert [label for share in shares for label in share.labels.tolist()] == wanted.labels.tolist()


def test_slices_are_the_requests_in_order(data) -> None:
    pages = timeline(data, max_history=20)
    part = slice_requests(pages, 1000, 1010)
    whole, cut = pages.take(np.arange(1000, 1010)), part.take(np.arange(10))
    assert cut.features.history.values().tolist() == whole.features.history.values().tolist()
    assert cut.features.candidate.values().tolist() == whole.features.candidate.values().tolist()
    assert FixedRequests(part, 4).num_steps() == 3


def test_users_of_few_ratings_ask_fewer_requests(data) -> None:
    rows = np.flatnonzero(data.user == data.user[0])[:3]
    source = RandomSplitTraining(data, rows, seed=0, num_folds=5, requests_a_step=2)
    assert source.num_steps(0) == 2
    batches = [source.batch(0, step) for step in range(2)]
    assert [batch.num_requests for batch in batches] == [2, 1]
    for batch in batches:
        assert batch.features.history.lengths().unique().tolist() == [2]


def test_one_fold_and_an_absent_file_are_refused(data, tmp_path) -> None:
    with pytest.raises(ValueError, match="num_folds=1 leaves no history"):
        RandomSplitTraining(data, np.arange(10), seed=0, num_folds=1)
    with pytest.raises(FileNotFoundError):
        load_movielens(tmp_path)


def test_a_recbole_without_the_files_is_told_how_to_mend_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "recbole").mkdir()
    (tmp_path / "recbole" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps recbole==1\.2\.1"):
        movielens_folder()
