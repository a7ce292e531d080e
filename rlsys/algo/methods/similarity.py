"""Similarity of texts from their tokens alone: TF-IDF cosine of single tokens and pairs. No torch.

Spärck Jones 1972 (inverse document frequency); Salton, Wong and Yang 1975 (cosine of weighted term vectors).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

Terms = Counter[int | tuple[int, int]]


def terms(ids: Sequence[int]) -> Terms:
    """Return the counts of all tokens and all pairs of adjacent tokens."""
    return Counter([*ids, *pairwise(ids)])


def most_alike(query: Sequence[int], texts: Sequence[Sequence[int]], count: int) -> list[int]:
    """Return the indices of the `count` texts with the largest cosine to `query`, descending; ties: later text first.

    A term's weight is its count times ln((1 + N) / N_term), over the N texts and the query: terms of all texts, such
    as those of a chat template, have almost no weight.
    """
    term_counts = [terms(t) for t in (*texts, query)]
    having = Counter(term for text in term_counts for term in text)
    weight = {term: math.log((1 + len(term_counts)) / n) for term, n in having.items()}
    norms = [math.sqrt(sum((n * weight[term]) ** 2 for term, n in text.items())) for text in term_counts]
    query_weights = {term: n * weight[term] ** 2 for term, n in term_counts[-1].items()}

    def cosine(index: int) -> float:
        text = term_counts[index]
        product = sum(value * text[term] for term, value in query_weights.items())
        return product / (norms[index] * norms[-1]) if norms[index] and norms[-1] else 0.0

    nearest = sorted(range(len(texts)), key=lambda i: (cosine(i), i), reverse=True)
    return nearest[:count]
