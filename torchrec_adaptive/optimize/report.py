"""What a model's rewriting hoisted, decomposed and left, and what each costs before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["hoisted", "decomposed", "left", "candidate"]


@dataclass(frozen=True)
class Operator:
    """One operator of the model's graph.

    FLOPs are multiplications and additions of matrix products, counted by PyTorch.

    Args:
        name: of its node in the traced graph.
        module: path of the module that it stands in.
        kind: "hoisted" runs once a request; "decomposed" has a share of each side; "left" reads copies of request rows
            at B rows; "candidate" never depended on the request.
        reason: why it was left; empty otherwise.
        before: FLOPs a candidate, in the model as it was.
        after_request: FLOPs a request, now.
        after_candidate: FLOPs a candidate, now.
    """

    name: str
    module: str
    kind: Kind
    reason: str
    before: int
    after_request: int
    after_candidate: int


@dataclass(frozen=True)
class RequestOrientReport:
    """All operators of a model, in the order of its graph.

    Args:
        operators: that compute something.
    """

    operators: tuple[Operator, ...]

    @property
    def hoisted(self) -> tuple[Operator, ...]:
        """Those that run once a request."""
        return self._of("hoisted")

    @property
    def decomposed(self) -> tuple[Operator, ...]:
        """Those that have a share of each side."""
        return self._of("decomposed")

    @property
    def left(self) -> tuple[Operator, ...]:
        """Those that read a copy of the request's rows for each candidate."""
        return self._of("left")

    def _of(self, kind: Kind) -> tuple[Operator, ...]:
        return tuple(operator for operator in self.operators if operator.kind == kind)

    def flops(self, num_requests: int, num_candidates: int) -> tuple[int, int]:
        """Of a batch, before and after.

        Args:
            num_requests: R.
            num_candidates: B, of all requests.

        Returns:
            (before, after).
        """
        before = sum(operator.before for operator in self.operators) * num_candidates
        after = sum(
            operator.after_request * num_requests + operator.after_candidate * num_candidates
            for operator in self.operators
        )
        return before, after

    def __str__(self) -> str:
        lines = [f"{'':10} {'operator':40} {'FLOPs a candidate':>18} {'now, a request':>16} {'now, a candidate':>16}"]
        for operator in self.operators:
            if operator.kind == "left" or operator.before or operator.after_request:
                where = f"{operator.module}:{operator.name}" if operator.module else operator.name
                lines.append(
                    f"{operator.kind:10} {where[-40:]:40} {operator.before:18,} {operator.after_request:16,} "
                    f"{operator.after_candidate:16,}" + (f"  {operator.reason}" if operator.reason else "")
                )
        return "\n".join(lines)
