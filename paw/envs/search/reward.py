"""Exact match after SQuAD's normalisation, as Search-R1 scores an answer
(verl/utils/reward_score/qa_em.py).

There are two differences. Only the agent's own answer counts, not an <answer> in retrieved
documents. If normalisation leaves nothing of a text ("The The"), the text is compared as written,
so an empty answer is not right.
"""

import re
import string
from collections.abc import Iterable

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize(text: str) -> str:
    """Put `text` in lower case, without ASCII punctuation and articles, with single spaces.

    >>> normalize("The  Beatles' A-side!")
    'beatles aside'
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, golden: Iterable[str]) -> bool:
    """Whether `answer` equals any golden answer.

    >>> exact_match(" the Nile.", ["River Nile", "Nile"])
    True
    """
    return _comparable(answer) in map(_comparable, golden)


def _comparable(text: str) -> str:
    return normalize(text) or text.strip().lower()
