"""Responses for reward functions and samples for the scorer."""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.core.types import Response, Sample, Status
from rlsys.data import Tokenizer

EOS = "<eos>"
"""EOS token of the quickstart's tokenizer."""


def response_of(text: str, tokenizer: Tokenizer | None = None) -> Response:
    """Return a response. It is finished if `text` ends with `<eos>`, else truncated."""
    ids = () if tokenizer is None else tokenizer.encode(text)
    return Response(text.removesuffix(EOS), finished=text.endswith(EOS), ids=ids)


def sample_of(ids: Sequence[int] = (), status: Status = Status.FINISHED) -> Sample:
    """Return a terminal sample with these response ids."""
    sample = Sample(0, 0, 0, [1], seed=0, status=status)
    sample.response_ids.extend(ids)
    return sample
