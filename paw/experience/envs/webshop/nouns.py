"""The nouns of a product title, which tell its type: spaCy's tagger, or a small filter where its model is missing.

The reference counts tokens that en_core_web_sm tags NOUN or PROPN. In a title that is nearly every word that is not a
number, a function word or a plain adjective, and that is what the filter keeps.
"""

import functools
import importlib.util
import re

from paw.errors import UserError

MODEL = "en_core_web_sm"
WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
ENDINGS = ("able", "ible", "less", "ful", "ous", "ly", "ish", "proof", "free")
_OTHERS = """
    a an the and or of for with without in on at by to from as up out off over under into per plus non no not all any
    every each this that these those your our their its his her my you it we is are be can has have use used using made
    make makes fits includes including included comes keep get new old big small large extra long short high low thick
    thin wide narrow deep light heavy soft hard hot cold cool warm dry wet clean fresh pure raw real rich mild bold dark
    bright clear flat round full half double single dual multi mini super ultra great good best better nice fine easy
    simple quick fast slow strong gentle smooth safe healthy natural organic vegan classic modern vintage traditional
    contemporary professional portable compatible universal electric digital automatic wireless only very more most
"""
OTHERS = frozenset(_OTHERS.split())


def choose(wanted: str) -> str:
    """ "spacy" or "rules" for webshop.nouns.

    Raises:
        UserError: spaCy's model is wanted and not installed.
    """
    installed = all(importlib.util.find_spec(name) for name in ("spacy", MODEL))
    if wanted == "spacy" and not installed:
        raise UserError(
            f"webshop.nouns = 'spacy' needs spaCy and {MODEL}: pip install spacy, then python -m spacy download {MODEL}"
        )
    return "spacy" if wanted != "rules" and installed else "rules"


@functools.lru_cache(1 << 16)
def nouns(title: str, kind: str) -> tuple[str, ...]:
    """Lower-cased nouns of `title` in order, repeats kept, as `kind` ("spacy" or "rules") finds them."""
    if kind == "spacy":
        return tuple(word.text.lower() for word in _spacy()(title) if word.pos_ in ("NOUN", "PROPN"))
    words = (word.lower() for word in WORD.findall(title))
    return tuple(word for word in words if len(word) > 1 and word not in OTHERS and not word.endswith(ENDINGS))


@functools.cache
def _spacy():
    import spacy

    return spacy.load(MODEL, disable=["parser", "ner", "lemmatizer"])
