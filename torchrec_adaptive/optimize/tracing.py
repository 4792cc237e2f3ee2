"""Tracing by torch.fx, with TorchRec's look-ups as leaves."""

from __future__ import annotations

import traceback

from torch import nn
from torch.fx import Graph, Tracer
from torchrec.modules.embedding_modules import EmbeddingBagCollection


class _LookUpTracer(Tracer):
    """Look-ups stay whole; parameters keep their names."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, EmbeddingBagCollection) or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module) -> Graph:
    """The graph of a model, look-ups whole.

    Args:
        model: FX-traceable.

    Returns:
        Its graph; tensors that tracing computed are attributes of the model named `_tensor_constant*`.

    Raises:
        ValueError: it can't be traced; the message has the line.
    """
    try:
        return _LookUpTracer().trace(model)
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/fx/" not in f.filename]
        own = frames[-1] if len(frames) > 1 else None
        where = f" at {own.filename}:{own.lineno}, `{own.line}`" if own else ""
        raise ValueError(
            f"{type(model).__name__} can't be traced by torch.fx{where}: {error}; make what depends on values into a "
            "function under torch.fx.wrap, or orient the layers before it"
        ) from error
