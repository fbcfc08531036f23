"""The nouns of a product title, which tell its type: spaCy's tagger, or a small filter where its model is missing.

The reference counts tokens that en_core_web_sm tags NOUN or PROPN. Titles are capitalised, so that the tagger takes
most adjectives for names: numbers and function words are what is left out, and what the filter leaves out.
"""

import functools
import importlib.util
import re

from paw.errors import UserError

MODEL = "en_core_web_sm"
WORD = re.compile(r"\b\d*[^\W\d_]\w*")
"""A word, with or without digits: "cord", "2pcs", "ht830v"."""
_FUNCTION = """
    a an the and or nor but of for with without in on at by to from as up out over under into onto per than via no not
    all any every each both this that these those your our their its his her my you it we they i is are be was can will
    has have s only very more most so
"""
FUNCTION = frozenset(_FUNCTION.split())


def choose(wanted: str) -> str:
    """ "spacy" or "rules" for env.nouns.

    Raises:
        UserError: spaCy's model is wanted and not installed.
    """
    installed = all(importlib.util.find_spec(name) for name in ("spacy", MODEL))
    if wanted == "spacy" and not installed:
        raise UserError(
            f"env.nouns = 'spacy' needs spaCy and {MODEL}: pip install spacy, then python -m spacy download {MODEL}"
        )
    return "spacy" if wanted != "rules" and installed else "rules"


@functools.lru_cache(1 << 16)
def nouns(title: str, kind: str) -> tuple[str, ...]:
    """Lower-cased nouns of `title` in order, repeats kept, as `kind` ("spacy" or "rules") finds them."""
    if kind == "spacy":
        return tuple(word.text.lower() for word in _spacy()(title) if word.pos_ in ("NOUN", "PROPN"))
    return tuple(word for word in WORD.findall(title.lower()) if word not in FUNCTION)


@functools.cache
def _spacy():
    import spacy

    return spacy.load(MODEL, disable=["parser", "ner", "lemmatizer"])
