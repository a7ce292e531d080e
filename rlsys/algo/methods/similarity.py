"""Which texts are most alike, from their tokens alone: TF-IDF cosine of single tokens and pairs. No torch.

Spärck Jones 1972 (inverse document frequency); Salton, Wong and Yang 1975 (cosine of weighted term vectors).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

Terms = Counter[int | tuple[int, int]]


def terms(ids: Sequence[int]) -> Terms:
    """How often each token and each pair of neighbours occurs."""
    return Counter([*ids, *pairwise(ids)])


def most_alike(query: Sequence[int], texts: Sequence[Sequence[int]], count: int) -> list[int]:
    """Places of the `count` texts with the largest cosine to `query`, the nearest first; of equals the later one.

    A term's weight is how often it occurs times ln((1 + N) / N_term), over the N texts and the query: what all of
    them have, as a chat template's words, weighs almost nothing.
    """
    found = [terms(t) for t in (*texts, query)]
    having = Counter(term for text in found for term in text)
    weight = {term: math.log((1 + len(found)) / n) for term, n in having.items()}
    norms = [math.sqrt(sum((n * weight[term]) ** 2 for term, n in text.items())) for text in found]
    asked = {term: n * weight[term] ** 2 for term, n in found[-1].items()}

    def cosine(place: int) -> float:
        text = found[place]
        product = sum(value * text[term] for term, value in asked.items())
        return product / (norms[place] * norms[-1]) if norms[place] and norms[-1] else 0.0

    places = sorted(range(len(texts)), key=lambda i: (cosine(i), i), reverse=True)
    return places[:count]
