"""How much smaller are the same training data with one row a request? MovieLens-100K, histories of up to 200 events.

    python -m benchmarks.request_storage [--quick] [--json FILE]

Every user's ratings, in the order of time, are cut into requests of 10; a request's history is that user's up to 200
ratings before it. An impression file has one row a candidate, with all that the request says repeated:

| figure | impression file |
| --- | --- |
| storage_ratio | rows shuffled, as tables for training by impressions are |
| storage_ratio_grouped | rows in the order of the log, those of a request together: the codec finds most repetitions |

The second is the codec's best case. RecD (arXiv 2211.05239) measured 3.71 against rows that were not grouped.
All files have row groups of 8,192 requests (81,920 rows where all have 10), pyarrow's defaults (dictionaries, pages of
1 MiB) and zstd at its default level. Checked before anything is reported: each conversion holds the same candidates,
histories, labels and weights as the rows that it came from.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks import harness
from torchrec_adaptive.datasets import (
    ConversionReport,
    MovieLens,
    RequestParquet,
    Requests,
    convert_impressions,
    load_movielens,
    movielens_schema,
    to_single_impressions,
    write_impression_parquet,
)
from torchrec_adaptive.datasets.arrow import pq
from torchrec_adaptive.datasets.movielens import ranges
from torchrec_adaptive.datasets.parquet_columns import decode_impressions
from torchrec_adaptive.datasets.parquet_writer import WRITER_OPTIONS
from torchrec_adaptive.request import FeatureSchema, RequestBatch

CANDIDATES_A_REQUEST = 10
MAX_HISTORY = 200
REQUESTS_A_BATCH = 1024
ROWS_A_GROUP = 81_920


def log_of_requests(data: MovieLens, max_history: int = MAX_HISTORY) -> Requests:
    """Requests of 10 consecutive ratings of one user, the last of a user may have fewer, in the order of time.

    Args:
        data: the ratings.
        max_history: most events of a history, the latest ones.

    Returns:
        Every rating is a candidate once; histories hold that user's ratings before the request's.
    """
    by_user = np.lexsort((data.item, data.timestamp_s, data.user))
    users, firsts, counts = np.unique(data.user[by_user], return_index=True, return_counts=True)
    pages = -(-counts // CANDIDATES_A_REQUEST)
    owner = np.repeat(np.arange(len(users)), pages)
    begins = ranges(np.zeros_like(pages), pages) * CANDIDATES_A_REQUEST
    starts = firsts[owner] + begins
    sizes = np.minimum(counts[owner] - begins, CANDIDATES_A_REQUEST)
    order = np.argsort(data.timestamp_s[by_user[starts]], kind="stable")
    starts, sizes, owner = starts[order], sizes[order], owner[order]
    lengths = np.minimum(starts - firsts[owner], max_history)
    return Requests(
        data,
        users[owner],
        by_user[ranges(starts, sizes)],
        sizes,
        by_user[ranges(starts - lengths, lengths)],
        lengths,
    )


def write_all(folder: Path, requests: Requests, schema: FeatureSchema) -> dict[str, ConversionReport]:
    """Both impression files and their conversions, and the check that they say the same.

    Args:
        folder: for the four files.
        requests: in the order of the log.
        schema: of the requests.

    Returns:
        Counts and sizes, for the rows "grouped" and "shuffled".

    Raises:
        ValueError: a batch of a conversion is not that of the rows it came from.
    """
    grouped, shuffled = folder / "grouped.parquet", folder / "shuffled.parquet"
    write_impression_parquet(_batches(requests), schema, grouped)
    table = pq.read_table(grouped)
    order = np.random.default_rng(0).permutation(table.num_rows)
    pq.write_table(table.take(order), shuffled, row_group_size=ROWS_A_GROUP, **WRITER_OPTIONS)
    sorted_again = np.argsort(table.column("request_id").to_numpy()[order], kind="stable")
    expected = {"grouped": table, "shuffled": table.take(order[sorted_again])}
    reports = {}
    for name, source in (("grouped", grouped), ("shuffled", shuffled)):
        target = folder / f"{name}_requests.parquet"
        reports[name] = convert_impressions(source, target, schema, is_grouped=name == "grouped")
        batches = RequestParquet(target, schema, REQUESTS_A_BATCH, shuffle=False)
        first = 0
        for step in range(batches.num_steps()):
            batch = to_single_impressions(batches.batch(0, step))
            rows = decode_impressions(expected[name].slice(first, batch.num_candidates), schema)
            first += batch.num_candidates
            if not _equal(batch, rows):
                raise ValueError(f"batch {step} of {target} is not that of {source}")
        if first != table.num_rows:
            raise ValueError(f"{target} has {first} candidates and {source} {table.num_rows}")
    return reports


def _batches(requests: Requests) -> Iterator[RequestBatch]:
    for first in range(0, requests.num_requests, REQUESTS_A_BATCH):
        yield requests.take(np.arange(first, min(requests.num_requests, first + REQUESTS_A_BATCH)))


def _equal(one: RequestBatch, other: RequestBatch) -> bool:
    pairs = [
        (one.candidate_to_request, other.candidate_to_request),
        (one.labels, other.labels),
        (one.weights, other.weights),
    ]
    for name in ("request", "candidate", "history"):
        ours, theirs = getattr(one.features, name), getattr(other.features, name)
        pairs += [(ours.values(), theirs.values()), (ours.lengths(), theirs.lengths())]
    return all(torch.equal(a, b) for a, b in pairs)


def storage_figures(requests: Requests) -> dict[str, float]:
    """Sizes, measured in a folder that is removed.

    Args:
        requests: in the order of the log.

    Returns:
        Figures by name.
    """
    with tempfile.TemporaryDirectory() as folder:
        reports = write_all(Path(folder), requests, movielens_schema())
    shuffled, grouped = reports["shuffled"], reports["grouped"]
    return {
        "num_requests": shuffled.num_requests,
        "num_impressions": shuffled.num_impressions,
        "mean_history_events": float(requests.history_lengths.mean()),
        "impression_bytes": shuffled.bytes_before,
        "request_bytes": shuffled.bytes_after,
        "storage_ratio": shuffled.storage_ratio,
        "storage_ratio_grouped": grouped.storage_ratio,
    }


def run(options: argparse.Namespace) -> dict[str, float]:
    """All ratings; it takes seconds, so `quick` changes nothing.

    Args:
        options: as `harness.parse` gave them.

    Returns:
        Figures.
    """
    return storage_figures(log_of_requests(load_movielens()))


def main() -> None:
    """Command line."""
    torch.set_num_threads(1)
    options = harness.parse("How much smaller are MovieLens-100K's training data with one row a request?")
    harness.report("request_storage", run(options), options)


if __name__ == "__main__":
    main()
