"""How a user rated around the moment of a candidate: numbers that a history without clock times cannot say.

People rate in bursts, in the order in which the site listed the films, and grow milder or harsher within a sitting.
So the ratings of a history that were given near a candidate's timestamp say more than the others. What a rating says
is what it has above the film's usual one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WINDOWS_S = (0, 60, 300, 3600, 86400)  # events at most so long before or after the candidate
NEIGHBOURS = (2, 5)  # so many events before, and so many after
NUM_NEARBY = 1 + len(WINDOWS_S) + 2 * len(NEIGHBOURS) + 4
_SHRINKAGE = 2.0  # imagined events at the mean of the user, so that a mean of few events stays near it
_ITEM_SHRINKAGE = 5.0
_USER_STRIDE = 1 << 40  # above every timestamp


def usual_ratings(item: Ints, rating: Ints, num_items: int) -> Floats:
    """Mean rating of each film, drawn towards the mean of all where it has few.

    Args:
        item: (N,) ids, of the ratings that may be known.
        rating: (N,).
        num_items: ids are below it.

    Returns:
        (num_items,).

    Example:
        >>> usual_ratings(np.array([0, 0, 1]), np.array([5, 5, 2]), 3).round(2).tolist()
        [4.29, 3.67, 4.0]
    """
    mean = float(rating.mean())
    above = np.bincount(item, rating - mean, num_items)
    return mean + above / (np.bincount(item, minlength=num_items) + _ITEM_SHRINKAGE)


def nearby_ratings(
    asked_s: Ints, asked_counts: Ints, event_s: Ints, event_above: Floats, event_counts: Ints
) -> NDArray[np.float32]:
    """Means of a request's events around each of its candidates.

    Column 0 is the mean over the whole history, with `_SHRINKAGE` imagined zeros. Then, less that mean: the mean over
    the events within each of `WINDOWS_S`; over the last and the next 2, then 5, events. Last: how long the history is,
    where in it the candidate falls, from 0 to 1, how many events are before it and how many after, as logarithms.

    Args:
        asked_s: (B,) timestamps of the candidates, request by request.
        asked_counts: (R,) candidates of each request.
        event_s: (T,) timestamps of the events, request by request, in any order.
        event_above: (T,) what each rating has above the film's usual one.
        event_counts: (R,) events of each request.

    Returns:
        (B, NUM_NEARBY).
    """
    owner = np.repeat(np.arange(len(event_counts)), event_counts)
    order = np.argsort(owner * _USER_STRIDE + event_s, kind="stable")
    clock = (owner * _USER_STRIDE + event_s)[order]
    sums = np.concatenate([[0.0], np.cumsum(event_above[order])])
    asker = np.repeat(np.arange(len(asked_counts)), asked_counts)
    bounds = np.concatenate([[0], np.cumsum(event_counts)])
    first, last = bounds[asker], bounds[asker + 1]
    known = last - first
    mean = (sums[last] - sums[first]) / (known + _SHRINKAGE)

    def above_mean(begin: Ints, end: Ints) -> Floats:
        begin, end = np.maximum(begin, first), np.minimum(end, last)
        return (sums[end] - sums[begin] + _SHRINKAGE * mean) / (end - begin + _SHRINKAGE) - mean

    now = asker * _USER_STRIDE + asked_s
    columns = [mean]
    for window_s in WINDOWS_S:
        columns.append(
            above_mean(np.searchsorted(clock, now - window_s), np.searchsorted(clock, now + window_s, "right"))
        )
    before = np.clip(np.searchsorted(clock, now), first, last)
    after = np.clip(np.searchsorted(clock, now, "right"), first, last)
    for count in NEIGHBOURS:
        columns += [above_mean(before - count, before), above_mean(after, after + count)]
    columns += [
        np.log1p(known) / 5.0,
        (before - first + 0.5 * (after - before)) / np.maximum(known, 1),
        np.log1p(before - first) / 5.0,
        np.log1p(last - after) / 5.0,
    ]
    return np.stack(columns, axis=1).astype(np.float32)
