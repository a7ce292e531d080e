"""Similarity of tokenized texts: TF-IDF cosine over tokens and pairs of adjacent tokens.

Spärck Jones 1972 (inverse document frequency); Salton, Wong and Yang 1975 (cosine of weighted term vectors).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

Terms = Counter[int | tuple[int, int]]


def terms(ids: Sequence[int]) -> Terms:
    """Count the tokens and the pairs of adjacent tokens of a text."""
    return Counter([*ids, *pairwise(ids)])


def most_alike(query: Sequence[int], texts: Sequence[Sequence[int]], count: int) -> list[int]:
    """Return the indices of the texts with the largest cosine similarity to `query`, the most similar first.

    The weight of a term in a text is its count times ln((1 + N) / n), where n of the N texts (including the query)
    contain it. Terms that all texts contain, such as those of a chat template, have almost no weight.

    Args:
        query: token ids of the query.
        texts: token ids of each text. Of two equally similar texts, the later one is first.
        count: number of texts to return, fewer if there are fewer texts.
    """
    term_counts = [terms(text) for text in (*texts, query)]
    document_counts = Counter(term for text in term_counts for term in text)
    weight = {term: math.log((1 + len(term_counts)) / n) for term, n in document_counts.items()}
    norms = [math.sqrt(sum((n * weight[term]) ** 2 for term, n in text.items())) for text in term_counts]
    query_weights = {term: n * weight[term] ** 2 for term, n in term_counts[-1].items()}

    def cosine(index: int) -> float:
        """Return the cosine similarity of a text to the query; 0 if one of them has no weight."""
        text = term_counts[index]
        product = sum(value * text[term] for term, value in query_weights.items())
        return product / (norms[index] * norms[-1]) if norms[index] and norms[-1] else 0.0

    nearest = sorted(range(len(texts)), key=lambda i: (cosine(i), i), reverse=True)
    return nearest[:count]
