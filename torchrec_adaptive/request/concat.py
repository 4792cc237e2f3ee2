"""Several batches made one: what a server does with the calls that it scores together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_adaptive.request.batch import RequestBatch
from torchrec_adaptive.request.features import RequestFeatures, empty_kjt


def concat_batches(batches: Sequence[RequestBatch]) -> RequestBatch:
    """One batch of several: requests after requests, candidates after candidates, the index shifted.

    Two batches of R=1 with 2 candidates, and R=2 with 1 and 1:

    | part | first | second | joined |
    | --- | --- | --- | --- |
    | request["user_id"] | [7] | [9], [5] | [7], [9], [5] |
    | candidate_to_request | 0, 0 | 0, 1 | 0, 0, 1, 2 |

    No row is looked at: the values of each key are cut out of each batch whole, and copied once.

    Args:
        batches: 1 or more, of one schema and on one device; keys may stand in another order in each. Where one has
            weights in a part, the ids of the others weigh 1 there.

    Returns:
        A batch with keys in the order of the first, on its device; the only batch itself where there is one.

    Raises:
        ValueError: no batch, or batches of different keys, widths or devices; the message names the first such value,
            the rule and the way out.
    """
    if not batches:
        raise ValueError("there are 0 batches to join; give 1 or more")
    first = batches[0]
    if len(batches) == 1:
        return first
    for place, batch in enumerate(batches):
        if batch.device != first.device:
            raise ValueError(
                f"batch {place} lies on {batch.device} and batch 0 on {first.device}; batches to join must lie on one "
                "device: move them with `to`"
            )
    features = [batch.features for batch in batches]
    shift, indices = 0, []
    for batch in batches:
        indices.append(batch.candidate_to_request + shift if shift else batch.candidate_to_request)
        shift += batch.num_requests
    return RequestBatch(
        RequestFeatures(
            _join_rows("request", [part.request for part in features]),
            _join_rows("candidate", [part.candidate for part in features]),
            _join_rows("history", [part.history for part in features]),
            torch.cat(indices),
        ),
        _join_dense("request_dense", [batch.request_dense for batch in batches]),
        _join_dense("candidate_dense", [batch.candidate_dense for batch in batches]),
        _join_dense("labels", [batch.labels for batch in batches]),
        torch.cat([batch.weights for batch in batches]),
    )


def _join_dense(name: str, parts: list[Tensor]) -> Tensor:
    for place, part in enumerate(parts):
        if part.shape[1] != parts[0].shape[1]:
            raise ValueError(
                f"{name} of batch {place} has {part.shape[1]} columns and that of batch 0 has {parts[0].shape[1]}; "
                "batches to join must be of one schema: join those of each schema by themselves"
            )
    return torch.cat(parts)


def _join_rows(name: str, parts: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Rows of several tensors of the same keys below each other."""
    keys = parts[0].keys()
    stride = sum(part.stride() for part in parts)
    orders = [_order(name, keys, place, part) for place, part in enumerate(parts)]
    if not keys:
        return empty_kjt(stride, parts[0].values().device)
    lengths = [part.lengths().view(len(keys), part.stride()) for part in parts]
    sizes_NF = torch.stack([rows_FR.sum(1) for rows_FR in lengths]).tolist()
    lengths = [
        rows_FR if order is None else rows_FR[torch.tensor(order, device=rows_FR.device)]
        for rows_FR, order in zip(lengths, orders, strict=True)
    ]
    weights = [part.weights_or_none() for part in parts]
    if all(weight is None for weight in weights):
        joined_weights = None
    else:
        dtype = next(weight.dtype for weight in weights if weight is not None)
        filled = [
            torch.ones_like(part.values(), dtype=dtype) if weight is None else weight
            for part, weight in zip(parts, weights, strict=True)
        ]
        joined_weights = _key_by_key(filled, sizes_NF, orders)
    return KeyedJaggedTensor(
        keys=keys,
        values=_key_by_key([part.values() for part in parts], sizes_NF, orders),
        lengths=torch.cat(lengths, dim=1).flatten(),
        weights=joined_weights,
        stride=stride,
    )


def _order(name: str, keys: list[str], place: int, part: KeyedJaggedTensor) -> list[int] | None:
    """Where each of `keys` stands in a part; None where they stand in that order already."""
    own = part.keys()
    if own == keys:
        return None
    if sorted(own) != sorted(keys):
        raise ValueError(
            f"the {name} part of batch {place} has the features {sorted(own)} and that of batch 0 {sorted(keys)}; "
            "batches to join must be of one schema: join those of each schema by themselves"
        )
    return [own.index(key) for key in keys]


def _key_by_key(parts: list[Tensor], sizes_NF: list[list[int]], orders: list[list[int] | None]) -> Tensor:
    """All of the first key, part after part, then all of the second: one copy."""
    pieces_NF = []
    for part, sizes_F, order in zip(parts, sizes_NF, orders, strict=True):
        pieces = part.split(sizes_F)
        pieces_NF.append(pieces if order is None else [pieces[place] for place in order])
    return torch.cat([piece for pieces_N in zip(*pieces_NF, strict=True) for piece in pieces_N])
