"""A generated world of facts about people, towns, rivers, lakes, companies and books, with a
document for each of them, and questions.

Every name has a word that no other name has, so each question has one answer. A two-hop question
names neither the entity in between nor the document that answers it. The world depends only on
(entities, numbered, seed).
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
"""Share of each kind among the entities."""
SPLITS = {"test": 0.2, "warmup": 0.3, "train": 0.5}
"""Share of each split among the questions."""
MAX_QUESTIONS = 100_000


class Relation(NamedTuple):
    object: str
    """Kind of the entity it leads to."""
    question: str
    phrase: str
    """How a two-hop question describes the object."""
    sentences: list[str]
    """How documents state the fact. A numbered world uses only the first."""

    @classmethod
    def parse(cls, row: list[str]) -> "Relation":
        """Make the relation of a row in world.toml."""
        kind, question, phrase, *sentences = row
        return cls(kind, question, phrase, sentences)


_TEXTS = tomllib.loads(Path(__file__).with_name("world.toml").read_text(encoding="utf-8"))
RELATIONS = {
    kind: [Relation.parse(row) for row in rows] for kind, rows in _TEXTS["relations"].items()
}
"""Relations to other entities, by kind of entity."""
CONSONANTS = "bdfghjklmnprstvwz"
VOWELS = "aeiou"
ENDINGS = ("n", "m", "r", "l", "k", "th", "nd", "rk", "rn", "x")


class Entity(NamedTuple):
    kind: str
    names: tuple[str, ...]
    """The usual name, then aliases."""


class World:
    """Entities, their documents and questions.

    With `numbered`, they have names such as "town 12" and short documents, for tiny models.
    """

    def __init__(self, entities: int, *, numbered: bool = False, seed: int = 0) -> None:
        self._rng = random.Random(f"world/{seed}/{entities}")
        self._numbered = numbered
        entity_kinds = []
        for kind, share in SHARES.items():
            entity_kinds += [kind] * int(entities * share)
        entity_kinds += ["person"] * (entities - len(entity_kinds))
        made_words = self._words()
        first_names = [next(made_words) for _ in range(40)]
        self.entities = [
            self._name(i, kind, made_words, first_names) for i, kind in enumerate(entity_kinds)
        ]
        by_kind: dict[str, list[int]] = {}
        for i, kind in enumerate(entity_kinds):
            by_kind.setdefault(kind, []).append(i)
        self.facts: list[list[int]] = []
        """Objects of each entity, in the order of RELATIONS for its kind."""
        for kind in entity_kinds:
            objects = [self._rng.choice(by_kind[relation.object]) for relation in RELATIONS[kind]]
            self.facts.append(objects)
        self.documents = [(str(i), self._document(i)) for i in range(entities)]
        """(id, contents) of each document, as in a corpus."""
        subjects = self._rng.sample(range(entities), entities)
        self.questions = list(itertools.islice(self._questions(subjects), MAX_QUESTIONS))
        """The (kind, question) of each question, shuffled. No two have the same text."""
        self._rng.shuffle(self.questions)

    def _name(self, i: int, kind: str, words: Iterator[str], first_names: list[str]) -> Entity:
        if self._numbered:
            return Entity(kind, names=(f"{kind} {i + 1}",))
        word = next(words)
        first_name = self._rng.choice(first_names)
        forms = _TEXTS["names"][kind]
        return Entity(kind, names=tuple(form.format(word=word, given=first_name) for form in forms))

    def _words(self) -> Iterator[str]:
        """Yield an endless stream of different pronounceable words."""
        choice = self._rng.choice
        used: set[str] = set()
        while True:
            word = ""
            for _ in range(choice((2, 3))):
                word += choice(CONSONANTS) + choice(VOWELS)
            word = (word + choice(ENDINGS)).capitalize()
            if word not in used:
                used.add(word)
                yield word

    def _document(self, i: int) -> str:
        kind = self.entities[i].kind
        name = self.entities[i].names[0]
        sentences = []
        for relation, other in zip(RELATIONS[kind], self.facts[i], strict=True):
            wording = relation.sentences[0]
            if not self._numbered:
                wording = self._rng.choice(relation.sentences)
            sentences.append(wording.format(s=name, o=self.entities[other].names[0]))
        if not self._numbered:
            self._rng.shuffle(sentences)
            form, fillers = _TEXTS["openings"][kind]
            opening = form.format(self._rng.choice(fillers.split(", ")), s=name)
            sentences.insert(0, opening)
        return f'"{name}"\n{" ".join(sentences)}'

    def _questions(self, subjects: list[int]) -> Iterator[tuple[str, Question]]:
        for subject in subjects:
            entity = self.entities[subject]
            name = entity.names[0]
            facts = self.facts[subject]
            for relation, middle in zip(RELATIONS[entity.kind], facts, strict=True):
                yield "one-hop", self._question(relation, name, answer=middle, hops=(subject,))
                phrase = relation.phrase.format(s=name)
                middle_facts = self.facts[middle]
                if subject in middle_facts:
                    continue  # one search for the subject would find the second document too
                for second, answer in zip(RELATIONS[relation.object], middle_facts, strict=True):
                    if answer in (subject, *facts):
                        continue  # the first document would state the answer
                    hops = (subject, middle)
                    yield "two-hop", self._question(second, phrase, answer=answer, hops=hops)

    def _question(
        self, relation: Relation, subject: str, answer: int, hops: tuple[int, ...]
    ) -> Question:
        return Question(
            text=relation.question.format(s=subject),
            answers=self.entities[answer].names,
            hops=tuple(self.entities[hop].names[0] for hop in hops),
        )


@functools.lru_cache(2)
def make_worlds(entities: int, *, numbered: bool, count: int) -> list[World]:
    return [World(entities, numbered=numbered, seed=seed) for seed in range(count)]


def split(worlds: Sequence[World]) -> dict[str, list[tuple[str, Question]]]:
    """Return the (kind, question) pairs by split.

    Several worlds are divided among the splits. Of a single world, the questions are divided.
    """
    by_world = []
    for i, world in enumerate(worlds):
        by_world.append([(kind, replace(question, world=i)) for kind, question in world.questions])
    pieces = by_world if len(worlds) > 1 else [[question] for question in by_world[0]]
    ends = [round(len(pieces) * share) for share in itertools.accumulate(SPLITS.values())]
    splits = {}
    for name, split_start, split_end in zip(SPLITS, [0, *ends[:-1]], ends, strict=True):
        splits[name] = list(itertools.chain(*pieces[split_start:split_end]))
    return splits


def digest(worlds: Sequence[World]) -> str:
    """Hash all documents and questions."""
    content = repr([(world.documents, world.questions) for world in worlds]).encode()
    return hashlib.sha256(content).hexdigest()[:16]
