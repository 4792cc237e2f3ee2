"""MovieLens-100K cut into requests for training and test: at random, or along the timeline.

Both are batch sources: `batch(epoch, step, rank, world_size)` is a pure function of its arguments and the seed, so that
a resumed job sees what an unbroken one would have seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from torchrec_adaptive.datasets.movielens import Ints, MovieLens, ranges
from torchrec_adaptive.datasets.movielens_nearby import usual_ratings
from torchrec_adaptive.request import RequestBatch


@dataclass(frozen=True)
class Requests:
    """Requests as row numbers, ready to be sliced into batches.

    Args:
        data: the ratings.
        users: (R,).
        candidates: (B,) rows, request by request.
        candidate_counts: (R,).
        histories: (T,) rows, request by request.
        history_lengths: (R,).
    """

    data: MovieLens
    users: Ints
    candidates: Ints
    candidate_counts: Ints
    histories: Ints
    history_lengths: Ints

    @property
    def num_requests(self) -> int:
        """R."""
        return self.users.shape[0]

    def take(self, chosen: Ints) -> RequestBatch:
        """A batch of some of the requests.

        Args:
            chosen: numbers of requests, in the order wanted.

        Returns:
            RequestBatch of `movielens_schema`.
        """
        counts, lengths = self.candidate_counts[chosen], self.history_lengths[chosen]
        first_candidate = (np.cumsum(self.candidate_counts) - self.candidate_counts)[chosen]
        first_event = (np.cumsum(self.history_lengths) - self.history_lengths)[chosen]
        return self.data.batch(
            self.users[chosen],
            self.candidates[ranges(first_candidate, counts)],
            counts,
            self.histories[ranges(first_event, lengths)],
            lengths,
        )


class RandomSplitTraining:
    """Training requests of the random split, redrawn each epoch.

    Each epoch deals a user's training ratings into `num_folds` hands at random. One request asks for one hand and has
    the other hands as its history: every rating is a candidate once an epoch, and never in its own history.

    Args:
        data: the ratings.
        rows: row numbers of the training ratings.
        seed: of the deals and of the order.
        num_folds: hands; 2 or more.
        requests_a_step: R of a batch, over all ranks.
    """

    def __init__(self, data: MovieLens, rows: Ints, seed: int, num_folds: int = 5, requests_a_step: int = 40) -> None:
        if num_folds < 2:
            raise ValueError(f"num_folds={num_folds} leaves no history; use 2 or more")
        self.data, self.seed = data, seed
        self.num_folds, self.requests_a_step = num_folds, requests_a_step
        self.rows = rows[np.argsort(data.user[rows], kind="stable")]
        _, ratings_a_user = np.unique(data.user[rows], return_counts=True)
        self.num_requests = int(np.minimum(ratings_a_user, num_folds).sum())  # a hand without ratings asks nothing
        self._epoch: tuple[int, Requests, Ints] | None = None

    def num_steps(self, epoch: int) -> int:
        """Batches an epoch."""
        return -(-self.num_requests // self.requests_a_step)

    def batch(self, epoch: int, step: int, rank: int = 0, world_size: int = 1) -> RequestBatch:
        """This rank's part of a step's requests."""
        requests, order = self._requests(epoch)
        chosen = order[step * self.requests_a_step : (step + 1) * self.requests_a_step]
        return requests.take(np.array_split(chosen, world_size)[rank])

    def _requests(self, epoch: int) -> tuple[Requests, Ints]:
        if self._epoch is None or self._epoch[0] != epoch:
            random = np.random.default_rng((self.seed, epoch))
            requests = self._deal(random)
            self._epoch = (epoch, requests, random.permutation(requests.num_requests))
        return self._epoch[1], self._epoch[2]

    def _deal(self, random: np.random.Generator) -> Requests:
        users, firsts = np.unique(self.data.user[self.rows], return_index=True)
        dealt = [random.permutation(hand) for hand in np.split(self.rows, firsts[1:])]
        asked, asked_counts, known, known_counts, owners = [], [], [], [], []
        for user, rows in zip(users, dealt, strict=True):
            hands = np.array_split(rows, self.num_folds)
            for number, hand in enumerate(hands):
                if not len(hand):
                    continue
                others = np.concatenate([other for place, other in enumerate(hands) if place != number])
                owners.append(user)
                asked.append(hand)
                asked_counts.append(len(hand))
                known.append(others)
                known_counts.append(len(others))
        return Requests(
            self.data,
            np.array(owners),
            np.concatenate(asked),
            np.array(asked_counts),
            np.concatenate(known),
            np.array(known_counts),
        )


class FixedRequests:
    """Requests in a fixed order: for evaluation, and for one pass along the timeline.

    Args:
        requests: all of them.
        requests_a_step: R of a batch, over all ranks.
    """

    def __init__(self, requests: Requests, requests_a_step: int = 64) -> None:
        self.requests, self.requests_a_step = requests, requests_a_step

    def num_steps(self, epoch: int = 0) -> int:
        """Batches of one pass."""
        return -(-self.requests.num_requests // self.requests_a_step)

    def batch(self, epoch: int, step: int, rank: int = 0, world_size: int = 1) -> RequestBatch:
        """This rank's part of a step's requests; the same in every epoch."""
        chosen = np.arange(self.requests.num_requests)[step * self.requests_a_step : (step + 1) * self.requests_a_step]
        return self.requests.take(np.array_split(chosen, world_size)[rank])


class ShuffledRequests(FixedRequests):
    """The same requests, in another order each epoch.

    Args:
        requests: all of them.
        seed: of the order.
        requests_a_step: R of a batch, over all ranks.
    """

    def __init__(self, requests: Requests, seed: int, requests_a_step: int = 64) -> None:
        super().__init__(requests, requests_a_step)
        self.seed = seed

    def batch(self, epoch: int, step: int, rank: int = 0, world_size: int = 1) -> RequestBatch:
        """This rank's part of a step's requests."""
        order = np.random.default_rng((self.seed, epoch)).permutation(self.requests.num_requests)
        chosen = order[step * self.requests_a_step : (step + 1) * self.requests_a_step]
        return self.requests.take(np.array_split(chosen, world_size)[rank])


def random_split(data: MovieLens, seed: int, nearby: bool = False) -> tuple[Ints, Requests, Requests]:
    """RecBole's protocol: 8:1:1 at random over all ratings.

    Args:
        data: the ratings.
        seed: of the permutation.
        nearby: whether batches say how the user rated around each candidate, by training ratings alone.

    Returns:
        Row numbers of the training ratings (for `RandomSplitTraining`); validation requests and test requests, one a
        user, whose histories are all of the user's training ratings. With `nearby`, train on the `data` of those.
    """
    order = np.random.default_rng(seed).permutation(data.num_ratings)
    first, second = int(0.8 * data.num_ratings), int(0.9 * data.num_ratings)
    train, valid, test = order[:first], order[first:second], order[second:]
    if nearby:
        usual = usual_ratings(data.item[train], data.rating[train], data.item_features["release_year"].shape[0])
        data = replace(data, usual_rating=usual)
    return train, _one_request_a_user(data, valid, train), _one_request_a_user(data, test, train)


def _one_request_a_user(data: MovieLens, asked: Ints, known: Ints) -> Requests:
    asked = asked[np.argsort(data.user[asked], kind="stable")]
    known = known[np.argsort(data.user[known], kind="stable")]
    users, counts = np.unique(data.user[asked], return_counts=True)
    starts = np.searchsorted(data.user[known], users, side="left")
    lengths = np.searchsorted(data.user[known], users, side="right") - starts
    return Requests(data, users, asked, counts, known[ranges(starts, lengths)], lengths)


def timeline(data: MovieLens, max_history: int = 200) -> Requests:
    """All pages in the order of time, a page being what a user rated in one second.

    Args:
        data: the ratings.
        max_history: most events of a history, the latest ones.

    Returns:
        Requests whose histories hold that user's ratings strictly before the page.
    """
    order = np.lexsort((data.item, data.user, data.timestamp_s))
    user, time = data.user[order], data.timestamp_s[order]
    begins = np.flatnonzero(np.concatenate([[True], (user[1:] != user[:-1]) | (time[1:] != time[:-1])]))
    counts = np.diff(np.concatenate([begins, [data.num_ratings]]))
    page_user, page_time = user[begins], time[begins]
    by_user = np.lexsort((data.item, data.timestamp_s, data.user))
    clock = data.user[by_user] * (1 << 40) + data.timestamp_s[by_user]
    ends = np.searchsorted(clock, page_user * (1 << 40) + page_time, side="left")
    firsts = np.searchsorted(data.user[by_user], page_user, side="left")
    lengths = np.minimum(ends - firsts, max_history)
    return Requests(data, page_user, order, counts, by_user[ranges(ends - lengths, lengths)], lengths)


def slice_requests(requests: Requests, first: int, last: int) -> Requests:
    """Requests number `first` to `last - 1`.

    Args:
        requests: all of them.
        first: number of the first.
        last: number after the last.

    Returns:
        A view of the same ratings.
    """
    candidate_bounds = np.concatenate([[0], np.cumsum(requests.candidate_counts)])
    event_bounds = np.concatenate([[0], np.cumsum(requests.history_lengths)])
    return Requests(
        requests.data,
        requests.users[first:last],
        requests.candidates[candidate_bounds[first] : candidate_bounds[last]],
        requests.candidate_counts[first:last],
        requests.histories[event_bounds[first] : event_bounds[last]],
        requests.history_lengths[first:last],
    )
