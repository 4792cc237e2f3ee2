"""MovieLens-100K, as the `recbole` distribution carries it, as requests.

100,000 ratings of 943 users on 1,682 films; a rating of 4 or more is a positive. The files are for research only, and
are read from the installed package, which itself is never imported.

Two ways to cut it:

- `random_split`: 8:1:1 at random over all ratings, RecBole's protocol. A history holds training ratings only.
- `timeline`: pages in the order of time, a page being what one user rated in one second. A history holds that
  user's ratings strictly before the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import util
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive.datasets.movielens_nearby import NUM_NEARBY, Floats, nearby_ratings
from torchrec_adaptive.request import Feature, FeatureSchema, RequestBatch, RequestFeatures

Ints = NDArray[np.int64]
# Task to the least rating that counts as positive there; the first is the one that public figures are of.
THRESHOLDS = {"liked": 4, "rated_2": 2, "rated_3": 3, "rated_5": 5}
TASKS = tuple(THRESHOLDS)
NUM_YEARS, FIRST_YEAR, YEARS_A_BUCKET = 20, 1920, 4


def movielens_folder() -> Path:
    """Where the installed recbole keeps the data set.

    Raises:
        FileNotFoundError: recbole is not installed; the message has the command.
    """
    spec = util.find_spec("recbole")
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        folder = Path(place) / "dataset_example" / "ml-100k"
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        "MovieLens-100K is not on this machine: it comes with recbole 1.2.1, installed as data by "
        "pip install --no-deps recbole==1.2.1"
    )


def movielens_schema(embedding_dim: int = 16, nearby: bool = False) -> FeatureSchema:
    """Features of the user (request side), of the film (candidate side), and the user's rated films.

    Args:
        embedding_dim: of every table.
        nearby: whether a candidate says how the user rated around its timestamp, as `nearby_ratings` has it.

    Returns:
        A schema with the task "liked" (a rating of 4 or more) and one for each other threshold of the rating: the
        order of the ratings is more to learn from than one cut through it, and "liked" is what is ranked by.
    """
    dim = embedding_dim
    return FeatureSchema(
        (
            Feature.bag("user_id", "request", 944, dim),
            Feature.bag("age", "request", 16, dim),
            Feature.bag("gender", "request", 2, dim),
            Feature.bag("occupation", "request", 32, dim),
            Feature.bag("zip_region", "request", 11, dim),
            Feature.bag("item_id", "candidate", 1683, dim, table="item"),
            Feature.bag("genres", "candidate", 32, dim, pooling="mean"),
            Feature.bag("release_year", "candidate", NUM_YEARS, dim),
            Feature.sequence("seen_item", 1683, dim, table="item"),
            Feature.sequence("seen_rating", 6, dim),
            *((Feature.dense("nearby", "candidate", NUM_NEARBY),) if nearby else ()),
        ),
        tasks=TASKS,
    )


@dataclass(frozen=True)
class MovieLens:
    """The ratings and what is known of users and films.

    Args:
        user: (N,) ids 1 to 943.
        item: (N,) ids 1 to 1682.
        rating: (N,) 1 to 5.
        timestamp_s: (N,) seconds since 1970.
        user_features: name to (944,) ids.
        item_features: name to (1683,) ids.
        genres: ids of all films side by side, film by film.
        genre_offsets: (1684,) where each film's genres begin.
        usual_rating: (1683,) what may be known of how each film is rated; with it, batches say how the user rated
            around each candidate.
    """

    user: Ints
    item: Ints
    rating: Ints
    timestamp_s: Ints
    user_features: dict[str, Ints]
    item_features: dict[str, Ints]
    genres: Ints
    genre_offsets: Ints
    usual_rating: Floats | None = None

    @property
    def num_ratings(self) -> int:
        """N."""
        return self.user.shape[0]

    def batch(
        self, users: Ints, candidates: Ints, candidate_counts: Ints, histories: Ints, history_lengths: Ints
    ) -> RequestBatch:
        """Requests from row numbers of the ratings.

        Args:
            users: (R,) the user of each request.
            candidates: (B,) rows to score, request by request.
            candidate_counts: (R,) how many of them each request has.
            histories: (T,) rows of the histories, request by request, oldest first.
            history_lengths: (R,) how many of them each request has.

        Returns:
            RequestBatch of `movielens_schema`.
        """
        items = self.item[candidates]
        num_requests, num_candidates = users.shape[0], candidates.shape[0]
        genre_counts = (self.genre_offsets[1:] - self.genre_offsets[:-1])[items]
        ones = np.ones(num_candidates, dtype=np.int64)
        candidate = _kjt(
            ["item_id", "genres", "release_year"],
            [
                items,
                self.genres[ranges(self.genre_offsets[items], genre_counts)],
                self.item_features["release_year"][items],
            ],
            [ones, genre_counts, ones],
            num_candidates,
        )
        request_values = [users, *(column[users] for column in self.user_features.values())]
        one = np.ones(num_requests, dtype=np.int64)
        request = _kjt(["user_id", *self.user_features], request_values, [one] * len(request_values), num_requests)
        history = _kjt(
            ["seen_item", "seen_rating"],
            [self.item[histories], self.rating[histories]],
            [history_lengths, history_lengths],
            num_requests,
        )
        index = np.repeat(np.arange(num_requests, dtype=np.int32), candidate_counts)
        nearby = torch.empty(num_candidates, 0)
        if self.usual_rating is not None:
            above = self.rating[histories] - self.usual_rating[self.item[histories]]
            asked_s, event_s = self.timestamp_s[candidates], self.timestamp_s[histories]
            nearby = torch.from_numpy(nearby_ratings(asked_s, candidate_counts, event_s, above, history_lengths))
        labels = self.rating[candidates][:, None] >= np.array(list(THRESHOLDS.values()))
        return RequestBatch(
            RequestFeatures(request, candidate, history, torch.from_numpy(index)),
            torch.empty(num_requests, 0),
            nearby,
            torch.from_numpy(labels.astype(np.float32)),
            torch.ones(num_candidates),
        )


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Numbers from each start, as many as its length says, side by side.

    Args:
        starts: (R,).
        lengths: (R,).

    Returns:
        (sum of the lengths,).

    Example:
        >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
        [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def load_movielens(folder: Path | None = None) -> MovieLens:
    """Read the three files.

    Args:
        folder: with `ml-100k.inter`, `.user` and `.item`; by default the installed one.

    Returns:
        All ratings, in the order of the file.

    Raises:
        FileNotFoundError: the files are not there.
    """
    folder = folder or movielens_folder()
    inter = np.array(_rows(folder / "ml-100k.inter"), dtype=np.float64).astype(np.int64)
    users, items = _rows(folder / "ml-100k.user"), _rows(folder / "ml-100k.item")
    user_ids = np.array([int(row[0]) for row in users])
    item_ids = np.array([int(row[0]) for row in items])
    years = [int(row[2]) if row[2].isdigit() else FIRST_YEAR for row in items]
    genre_ids = _codes([genre for row in items for genre in row[3].split()])
    genres: list[Ints] = [np.empty(0, dtype=np.int64)] * 1683
    position = 0
    for item, row in zip(item_ids, items, strict=True):
        count = len(row[3].split())
        genres[item] = genre_ids[position : position + count]
        position += count
    user_columns = {
        "age": np.array([min(int(row[1]) // 5, 15) for row in users]),
        "gender": _codes([row[2] for row in users]),
        "occupation": _codes([row[3] for row in users]),
        "zip_region": np.array([int(row[4][0]) if row[4][0].isdigit() else 10 for row in users]),
    }
    year = np.clip((np.array(years) - FIRST_YEAR) // YEARS_A_BUCKET, 0, NUM_YEARS - 1)
    return MovieLens(
        user=inter[:, 0],
        item=inter[:, 1],
        rating=inter[:, 2],
        timestamp_s=inter[:, 3],
        user_features={name: _by_id(user_ids, column, 944) for name, column in user_columns.items()},
        item_features={"release_year": _by_id(item_ids, year, 1683)},
        genres=np.concatenate(genres),
        genre_offsets=np.concatenate([[0], np.cumsum([len(g) for g in genres])]).astype(np.int64),
    )


def _rows(path: Path) -> list[list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [line.split("\t") for line in lines]


def _codes(words: list[str]) -> Ints:
    return np.unique(words, return_inverse=True)[1].astype(np.int64)


def _by_id(ids: Ints, column: Ints, size: int) -> Ints:
    table = np.zeros(size, dtype=np.int64)
    table[ids] = column
    return table


def _kjt(keys: list[str], values: list[Ints], lengths: list[Ints], stride: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
        stride=stride,
    )
