"""Search-augmented question answering: the questions asked, and one episode of a question."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from paw.config import plugins
from paw.config.sections import RunConfig
from paw.envs.base import Endless, ScheduledFactory, Tasks, shuffled
from paw.envs.conversation import ConversationWrapper, Message
from paw.envs.search import data, world
from paw.envs.search.data import Question
from paw.envs.search.prompt import (
    SEARCH,
    SYSTEM,
    Action,
    ChatStyle,
    CompactStyle,
    PaperStyle,
    Style,
    title,
)
from paw.envs.search.retrieval import make_retriever
from paw.envs.search.retrieval.base import Hit
from paw.envs.search.reward import exact_match
from paw.envs.settings import SearchConfig
from paw.errors import EnvironmentFailure, NoOracleError, UserError, describe, masked
from paw.types import Outcome, Reply, Task, ToolCall

Search = Callable[[Question, str], list[Hit]]
"""Maps (question of the episode, query) to the documents found."""
WORLDS = 100
"""Number of generated worlds in compact style."""


class SearchFactory(ScheduledFactory):
    """The questions of files, or of generated worlds, and the retriever that answers searches.

    It needs the run because ZeroSearch's noise grows with the updates.

    Raises UserError if env.data or env.corpus is damaged or set without the other, or if the
    retriever is missing.
    """

    Config = SearchConfig
    name = "search"

    def __init__(self, config: SearchConfig, run: RunConfig, tasks_per_update: int = 1) -> None:
        self.config = config
        self.reward_max = config.reward
        self.invalid_penalty = config.invalid_penalty
        self.may_block = config.retriever == "zerosearch" or config.retriever.startswith("http")
        self._tasks_per_update = tasks_per_update
        _check_sources(config, has_own_documents=self.may_block)

        self._worlds: list[world.World] = []
        self._generated: dict[str, list[Task]] = {}
        if config.data is None:
            # A tiny model would memorize the facts of one small world. So it is trained on many
            # worlds and evaluated on others.
            numbered = config.style == "compact"
            count = 1
            if numbered and not self.may_block:
                count = WORLDS
            self._worlds = world.make_worlds(config.entities, numbered=numbered, count=count)
            for split, questions in world.split(self._worlds).items():
                tasks = []
                for i, (kind, question) in enumerate(questions):
                    tasks.append(Task(f"generated/{split}/{i}", kind=kind, payload=question))
                self._generated[split] = tasks
        self._load = functools.cache(data.load)
        self._split(config.eval_split)
        if config.data is None or data.candidates(config.data, config.train_split):
            self._split(config.train_split)  # damaged files are reported before a model is loaded

        self._simulator = None
        documents = [world_.documents for world_ in self._worlds] or [None]
        self._retriever = functools.cache(lambda i: make_retriever(config, documents[i]))
        if config.retriever == "zerosearch":
            self._simulator = plugins.load("retrievers", "zerosearch")(config.simulator, run)
        else:
            self._retriever(0)  # a missing library or server is reported now

    def tasks(self, split: str, seed: int) -> Tasks:
        """Return the questions of a split. With ZeroSearch, training questions carry their update.

        Raises UserError if the split is unknown, missing, damaged or empty. Also raises it for
        "warmup" with questions from files, which do not say how to find the answer.
        """
        if split == "warmup" and self.config.data:
            raise UserError(
                "model.path = 'quickstart' is warmed up on generated questions: leave env.data out"
            )
        tasks = self._split(split)
        if self._simulator is None or split != self.config.train_split:
            return tasks

        def task_with_update(i: int) -> Task:
            task = tasks[shuffled(seed, i, len(tasks))]
            return replace(task, payload=replace(task.payload, step=i // self._tasks_per_update))

        return Endless(task_with_update)

    def make(self) -> "SearchEnv | SearchChat":
        if self.config.style == "chat":
            return SearchChat(SearchEnv(self.config, self._search))
        names: list[str] = []
        if self.config.style == "compact" and self._worlds:
            # All numbered worlds have the same names.
            names = [entity.names[0] for entity in self._worlds[0].entities]
        return SearchEnv(self.config, self._search, names)

    def fingerprint(self) -> str:
        """Return a hash of the questions (and generated documents), and the retriever."""
        config = self.config
        corpus = f" {config.corpus.name}" if config.corpus else ""
        engine = f"{masked(config.retriever)}{corpus} top {config.topk}"
        if self._worlds:
            return f"generated {config.entities} {world.digest(self._worlds)}, {engine}"
        assert config.data is not None
        files = data.candidates(config.data, config.train_split)
        files += data.candidates(config.data, config.eval_split)
        digests = [f"{path.stem} {data.digest(path)}" for path in dict.fromkeys(files)]
        return f"{' '.join(digests)}, {engine}"

    def _split(self, split: str) -> list[Task]:
        if self.config.data:
            return self._load(data.find_file(self.config.data, split))
        if split not in self._generated:
            splits = ", ".join(self._generated)
            raise UserError(
                f"generated questions have no split '{split}', only {splits}; "
                "name one, or set env.data"
            )
        return self._generated[split]

    def _search(self, question: Question, query: str) -> list[Hit]:
        if self._simulator:
            return self._simulator.search(query, self.config.topk, question.step)
        return self._retriever(question.world).search([query], self.config.topk)[0]


def _check_sources(config: SearchConfig, *, has_own_documents: bool) -> None:
    """Raise UserError unless questions and documents are both from files, or both generated.

    `has_own_documents` says whether the retriever needs none of ours.
    """
    if config.data and not (has_own_documents or config.corpus):
        raise UserError(
            f"env.data = '{config.data}' needs documents: set env.corpus to a JSONL file, "
            "or env.retriever to the URL of a server (`paw serve retriever`)"
        )
    if config.corpus and not config.data:
        raise UserError(
            f"env.corpus = '{config.corpus}' needs env.data: "
            "generated questions are about the generated world"
        )


class SearchEnv:
    """Plays one question at a time. `names` are the entities that compact actions may name."""

    task: str = ""

    def __init__(self, config: SearchConfig, search: Search, names: Sequence[str] = ()) -> None:
        self.config = config
        self.style = _style(config)
        self._retrieve = search
        self._actions = [f"search[{name}]" for name in names]
        self._actions += [f"answer[{name}]" for name in names]
        self._done = True
        # Set by `reset`.
        self._question: Question
        self._past: list[tuple[Action, str]] = []
        """The (action, observation) of each turn so far."""
        self._titles: list[set[str]] = []
        """Titles of the documents that each turn found."""

    def reset(self, task: Task) -> str:
        """Start `task`, whose payload is a Question. The first observation is its text."""
        self._question = task.payload
        self.task = self._question.text
        self._past = []
        self._titles = []
        self._done = False
        return self.task

    def context(self) -> str:
        return self.style.prompt(self.task, self._past)

    def step(self, response: str) -> Outcome:
        """Search or answer.

        The episode ends with an answer or after env.max_turns turns. The last observation is empty.
        Raises EnvironmentFailure if the search fails.
        """
        action, valid = self.style.parse_action(response)
        return self.play(action, valid=valid)

    def play(self, action: Action, *, valid: bool) -> Outcome:
        """Play a turn's action. `valid` says whether the response was well-formed."""
        assert not self._done, "step() before reset() or after the end"
        self._done = action.verb == "answer" or len(self._past) + 1 >= self.config.max_turns
        observation = ""
        titles: set[str] = set()
        if action.verb == "search" and not self._done:
            documents = [hit.contents for hit in self._search(action.text)]
            observation = self.style.observation(documents)
            titles = {title(contents) for contents in documents}
        self._past.append((action, observation))
        self._titles.append(titles)

        won = action.verb == "answer" and exact_match(action.text, self._question.answers)
        return Outcome(
            observation,
            reward=self.config.reward if won else 0.0,
            done=self._done,
            won=won,
            action=str(action),
            valid=valid,
        )

    def oracle(self) -> str:
        return self.style.format_action(self.best())

    def best(self) -> Action:
        """Return the best action: search for the next document the prompt lacks, or else answer."""
        hops = self._question.hops
        if not hops:
            raise NoOracleError("only generated questions say how they are answered")
        first_shown = max(0, len(self._titles) - self.style.history)
        titles_in_prompt = set().union(*self._titles[first_shown:])
        hops_in_prompt = [i for i, hop in enumerate(hops) if hop in titles_in_prompt]
        next_hop = hops_in_prompt[-1] + 1 if hops_in_prompt else 0
        if next_hop == len(hops):
            return Action("answer", self._question.answers[0])
        return Action("search", hops[next_hop])

    def admissible_actions(self) -> list[str]:
        """Return a search for each entity, and each entity as an answer.

        Returns [] unless the style is compact and questions are generated.
        """
        return self._actions

    def format_action(self, action: str) -> str:
        """Return the response for "search[query]" or "answer[text]".

        Any other action is returned unchanged, as an invalid response.
        """
        parsed = Action.parse(action)
        return self.style.format_action(parsed) if parsed.verb else action

    def _search(self, query: str) -> list[Hit]:
        if not query:  # servers differ in their answer to an empty query
            return []
        try:
            return self._retrieve(self._question, query)
        except Exception as error:  # including a UserError, which would end the whole run
            raise EnvironmentFailure(f"search failed: {describe(error)}") from error


def _style(config: SearchConfig) -> Style:
    if config.style == "paper":
        return PaperStyle(history=config.history, think=config.think)
    return CompactStyle() if config.style == "compact" else ChatStyle()


class SearchChat(ConversationWrapper):
    """Plays it as a conversation: `search` is a tool, and a text without a call is the answer."""

    tools = (SEARCH,)

    def begin(self, task: Task) -> list[Message]:
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self._game.reset(task)},
        ]

    def call(self, call: ToolCall) -> Outcome:
        return self._game.play(Action("search", call.arguments["query"].strip()), valid=True)

    def say(self, text: str) -> Outcome:
        return self._game.play(Action("answer", text), valid=True)

    def oracle(self) -> str:
        return self._reply(self._game.best())

    def format_action(self, action: str) -> str:
        parsed = Action.parse(action)
        return self._reply(parsed) if parsed.verb else action

    def _reply(self, action: Action) -> Reply:
        """Return the reply of a model that plays `action`."""
        if action.verb == "answer":
            return Reply.of(action.text)
        call_id = f"call{len(self.messages):05}"
        return Reply.of("", ToolCall("search", {"query": action.text}, call_id))
