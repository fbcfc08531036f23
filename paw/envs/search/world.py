"""A generated world of facts: people, towns, rivers, lakes, companies and books, a document of each, and questions.

Every relation gives an entity one object, and every name holds a word that no other has, so that a question has one
answer. A two-hop question names neither the entity in between nor the document that answers it: the first search finds
the one, the second the other. Everything follows from (entities, numbered, seed).
"""

import functools
import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from paw.envs.search.data import Question

SHARES = {"person": 0.3, "town": 0.2, "book": 0.2, "company": 0.15, "river": 0.1, "lake": 0.05}
"""Of the entities."""
SPLITS = {"test": 0.2, "warmup": 0.3, "train": 0.5}
"""Of the questions."""
MAX_QUESTIONS = 100_000


class Relation(NamedTuple):
    object: str
    """Kind of the object."""
    question: str
    phrase: str
    """What a question calls the object by."""
    sentences: tuple[str, ...]
    """How documents say it; a numbered world has the first alone."""


RELATIONS = {
    "person": (
        Relation(
            "town",
            "In which town was {s} born?",
            "the birthplace of {s}",
            (
                "{s} was born in {o}.",
                "{s} comes from {o}.",
                "{s} grew up in {o}, the place of birth.",
            ),
        ),
        Relation(
            "company",
            "Which company does {s} work for?",
            "the employer of {s}",
            ("{s} works for {o}.", "{s} is employed by {o}.", "{s} has spent a whole working life at {o}."),
        ),
    ),
    "town": (
        Relation(
            "river",
            "Which river does {s} lie on?",
            "the river that flows through {s}",
            ("{s} lies on {o}.", "{s} was built where an old road crosses {o}.", "The bridges of {s} span {o}."),
        ),
        Relation(
            "person",
            "Who is the mayor of {s}?",
            "the mayor of {s}",
            ("The mayor of {s} is {o}.", "{s} has elected {o} mayor.", "{o} is mayor of {s}."),
        ),
    ),
    "river": (
        Relation(
            "lake",
            "Which lake does {s} flow into?",
            "the lake that {s} flows into",
            ("{s} flows into {o}.", "The waters of {s} end in {o}.", "{s} reaches {o} after many bends."),
        ),
    ),
    "lake": (
        Relation(
            "town",
            "What is the largest town on the shores of {s}?",
            "the largest town on the shores of {s}",
            ("The largest town on {s} is {o}.", "Most people at {s} live in {o}.", "Ferries cross {s} from {o}."),
        ),
    ),
    "company": (
        Relation(
            "person",
            "Who founded {s}?",
            "the founder of {s}",
            ("{s} was founded by {o}.", "{o} set up {s}.", "The founder of {s} is {o}."),
        ),
        Relation(
            "town",
            "In which town does {s} have its head office?",
            "the town where {s} has its head office",
            ("{s} has its head office in {o}.", "{s} is run from {o}.", "The managers of {s} sit in {o}."),
        ),
    ),
    "book": (
        Relation(
            "person",
            "Who wrote {s}?",
            "the author of {s}",
            ("{s} was written by {o}.", "{o} is the author of {s}.", "{o} worked on {s} for years."),
        ),
        Relation(
            "town",
            "In which town is {s} set?",
            "the town where {s} is set",
            ("{s} is set in {o}.", "The story of {s} takes place in {o}.", "{s} tells of a summer in {o}."),
        ),
    ),
}
OPENINGS = {
    "person": ("{s} is a {}.", ("painter", "chemist", "teacher", "singer", "surveyor", "nurse", "printer", "pilot")),
    "town": ("{s} is a town known for its {}.", ("market", "clock tower", "orchards", "glass", "theatre", "harbour")),
    "river": ("{s} is a {} river.", ("slow", "short", "winding", "cold", "broad", "shallow")),
    "lake": ("{s} is a {} lake.", ("deep", "quiet", "large", "round", "salty")),
    "company": ("{s} is a company that makes {}.", ("clocks", "boats", "paper", "tiles", "lenses", "bicycles")),
    "book": ("{s} is a {} novel.", ("short", "long", "much read", "forgotten", "comic", "historical")),
}
NAMES = {  # forms of a name around its own word; the first is the usual one
    "person": ("{given} {word}",),
    "town": ("{word}", "town of {word}"),
    "river": ("River {word}", "{word}", "{word} River"),
    "lake": ("Lake {word}", "{word}", "{word} Lake"),
    "company": ("{word} Works", "{word}"),
    "book": ("The Road to {word}", "Road to {word}"),
}
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
        words = _words(self._rng)
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
        return Entity(kind, tuple(form.format(word=word, given=first) for form in NAMES[kind]))

    def _document(self, i: int) -> str:
        kind, names = self.entities[i]
        sentences = []
        for relation, o in zip(RELATIONS[kind], self.facts[i], strict=True):
            wording = relation.sentences[0] if self._numbered else self._rng.choice(relation.sentences)
            sentences.append(wording.format(s=names[0], o=self.entities[o].names[0]))
        if not self._numbered:
            self._rng.shuffle(sentences)
            form, fillers = OPENINGS[kind]
            sentences.insert(0, form.format(self._rng.choice(fillers), s=names[0]))
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


def _words(rng: random.Random) -> Iterator[str]:
    """Pronounceable words without end, all different."""
    taken = set()
    while True:
        syllables = (rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.choice((2, 3))))
        word = ("".join(syllables) + rng.choice(ENDINGS)).capitalize()
        if word not in taken:
            taken.add(word)
            yield word
