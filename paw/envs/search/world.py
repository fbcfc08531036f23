"""A generated world of facts: people, towns, rivers, lakes, companies and books, a document of each, and questions.

Every name holds a word that no other has, so a question has one answer. A two-hop question names neither the entity in
between nor the document that answers it. Everything follows from (entities, numbered, seed).
"""

import functools
import hashlib
import itertools
import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from paw.envs.search.data import Question

SHARES = {"person": 0.3, "town": 0.2, "book": 0.2, "company": 0.15, "river": 0.1, "lake": 0.05}
"""Of the entities."""
SPLITS = {"test": 0.2, "warmup": 0.3, "train": 0.5}
"""Of the questions."""
MAX_QUESTIONS = 100_000


class Relation(NamedTuple):
    object: str
    question: str
    phrase: str
    """What a question calls the object by."""
    sentences: list[str]
    """How documents say it; a numbered world has the first alone."""


_TEXTS = tomllib.loads(Path(__file__).with_name("world.toml").read_text(encoding="utf-8"))
RELATIONS = {kind: [Relation(r[0], r[1], r[2], r[3:]) for r in rows] for kind, rows in _TEXTS["relations"].items()}
CONSONANTS, VOWELS = "bdfghjklmnprstvwz", "aeiou"
ENDINGS = ("n", "m", "r", "l", "k", "th", "nd", "rk", "rn", "x")


class Entity(NamedTuple):
    kind: str
    names: tuple[str, ...]
    """The usual name, then aliases."""


class World:
    """Entities, their documents and questions. `numbered` names them "town 12", in short documents, for tiny models."""

    def __init__(self, entities: int, *, numbered: bool = False, seed: int = 0) -> None:
        self._rng = random.Random(f"world/{seed}/{entities}")
        self._numbered = numbered
        kinds = [kind for kind, share in SHARES.items() for _ in range(int(entities * share))]
        kinds += ["person"] * (entities - len(kinds))
        words = self._words()
        given = [next(words) for _ in range(40)]
        self.entities = [self._name(i, kind, words, given) for i, kind in enumerate(kinds)]
        of_kind: dict[str, list[int]] = {}
        for i, kind in enumerate(kinds):
            of_kind.setdefault(kind, []).append(i)
        self.facts = [[self._rng.choice(of_kind[relation.object]) for relation in RELATIONS[kind]] for kind in kinds]
        """Objects of each entity, in the order of its kind's RELATIONS."""
        self.documents = [(str(i), self._document(i)) for i in range(entities)]
        """(id, contents) each, as a corpus has them."""
        subjects = self._rng.sample(range(entities), entities)
        self.questions = list(itertools.islice(self._questions(subjects), MAX_QUESTIONS))
        """(kind, question) each, no two of one text, shuffled."""
        self._rng.shuffle(self.questions)

    def _name(self, i: int, kind: str, words: Iterator[str], given: list[str]) -> Entity:
        if self._numbered:
            return Entity(kind, (f"{kind} {i + 1}",))
        word, first = next(words), self._rng.choice(given)
        return Entity(kind, tuple(form.format(word=word, given=first) for form in _TEXTS["names"][kind]))

    def _words(self) -> Iterator[str]:
        """Pronounceable words without end, all different."""
        taken, choice = set(), self._rng.choice
        while True:
            syllables = (choice(CONSONANTS) + choice(VOWELS) for _ in range(choice((2, 3))))
            word = ("".join(syllables) + choice(ENDINGS)).capitalize()
            if word not in taken:
                taken.add(word)
                yield word

    def _document(self, i: int) -> str:
        kind, names = self.entities[i]
        sentences = []
        for relation, o in zip(RELATIONS[kind], self.facts[i], strict=True):
            wording = relation.sentences[0] if self._numbered else self._rng.choice(relation.sentences)
            sentences.append(wording.format(s=names[0], o=self.entities[o].names[0]))
        if not self._numbered:
            self._rng.shuffle(sentences)
            form, fillers = _TEXTS["openings"][kind]
            sentences.insert(0, form.format(self._rng.choice(fillers.split(", ")), s=names[0]))
        return f'"{names[0]}"\n{" ".join(sentences)}'

    def _questions(self, subjects: list[int]) -> Iterator[tuple[str, Question]]:
        for s in subjects:
            name, facts = self.entities[s].names[0], self.facts[s]
            for relation, o in zip(RELATIONS[self.entities[s].kind], facts, strict=True):
                yield "one-hop", self._question(relation, name, o, (s,))
                for further, end in zip(RELATIONS[relation.object], self.facts[o], strict=True):
                    # Else one search might do: its documents would say the answer, or hold the second document.
                    if end not in (s, *facts) and s not in self.facts[o]:
                        yield "two-hop", self._question(further, relation.phrase.format(s=name), end, (s, o))

    def _question(self, relation: Relation, subject: str, answer: int, hops: tuple[int, ...]) -> Question:
        titles = tuple(self.entities[hop].names[0] for hop in hops)
        return Question(relation.question.format(s=subject), self.entities[answer].names, titles)


@functools.lru_cache(2)
def make_worlds(entities: int, *, numbered: bool, count: int) -> list[World]:
    return [World(entities, numbered=numbered, seed=seed) for seed in range(count)]


def split(worlds: Sequence[World]) -> dict[str, list[tuple[str, Question]]]:
    """(kind, question) of each of SPLITS: of one world its questions are dealt out, of several whole worlds."""
    indexed = [[(kind, replace(question, world=i)) for kind, question in w.questions] for i, w in enumerate(worlds)]
    items = [[question] for question in indexed[0]] if len(worlds) == 1 else indexed
    ends = [round(len(items) * share) for share in itertools.accumulate(SPLITS.values())]
    parts = [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return {name: list(itertools.chain(*part)) for name, part in zip(SPLITS, parts, strict=True)}


def digest(worlds: Sequence[World]) -> str:
    """Of everything: worlds of one digest are the same."""
    content = repr([(world.documents, world.questions) for world in worlds]).encode()
    return hashlib.sha256(content).hexdigest()[:16]
