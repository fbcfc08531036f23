"""Search-augmented question answering: which questions are asked, and one episode of a question."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from paw import plugins
from paw.config import RunConfig
from paw.envs.base import Endless, EnvFactory, Tasks, shuffled
from paw.envs.conversation import Message, Retold
from paw.envs.search import data, world
from paw.envs.search.data import Question
from paw.envs.search.prompt import SEARCH, SYSTEM, Action, ChatStyle, CompactStyle, PaperStyle, Style, title
from paw.envs.search.retrieval import Hit, make_retriever
from paw.envs.search.reward import exact_match
from paw.envs.settings import SearchConfig
from paw.errors import EnvironmentFailure, NoOracleError, UserError, describe, masked
from paw.types import Outcome, Reply, Task, ToolCall

Search = Callable[[Question, str], list[Hit]]
"""What a query, asked because of a question, finds."""
WORLDS = 100
"""Generated ones, in compact style."""


class SearchFactory(EnvFactory):
    """The questions of files, or of a generated world, and the retriever that answers searches.

    Raises UserError: env.data or env.corpus is damaged or without the other, or what answers searches is missing.
    """

    Config = SearchConfig
    name = "search"

    def __init__(self, config: SearchConfig, run: RunConfig, tasks_per_update: int = 1) -> None:
        self.config, self.reward_max, self.invalid_penalty = config, config.reward, config.invalid_penalty
        self.may_block = config.retriever == "zerosearch" or config.retriever.startswith("http")
        # A tiny model would learn the facts of one small world by heart: it gets many, and is evaluated in others.
        numbered = config.style == "compact"
        count = WORLDS if numbered and not self.may_block else 1
        self._worlds = [] if config.data else world.make_worlds(config.entities, numbered=numbered, count=count)
        if config.data and not (self.may_block or config.corpus):
            raise UserError(
                f"env.data = '{config.data}' needs documents: set env.corpus to a JSONL file, or env.retriever to "
                "the URL of a server (`paw serve retriever`)"
            )
        if config.corpus and not config.data:
            raise UserError(
                f"env.corpus = '{config.corpus}' needs env.data: generated questions are about the generated world"
            )
        self._load = functools.cache(data.load)
        self._generated = {
            split: [Task(f"generated/{split}/{i}", *question) for i, question in enumerate(questions)]
            for split, questions in (world.split(self._worlds) if self._worlds else {}).items()
        }
        self._split(config.eval_split)
        if config.data is None or data.candidates(config.data, config.train_split):
            self._split(config.train_split)  # damaged files are reported before a model is loaded
        self._simulator, self._per_update = None, tasks_per_update
        documents = [one.documents for one in self._worlds] or [None]
        self._retriever = functools.cache(lambda i: make_retriever(config, documents[i]))
        if config.retriever == "zerosearch":
            self._simulator = plugins.load("retrievers", "zerosearch")(config.simulator, run)
        else:
            self._retriever(0)  # what is missing is reported now

    def tasks(self, split: str, seed: int) -> Tasks:
        """The questions of a split; with ZeroSearch those of training know the update in which they are asked.

        Raises UserError: the split is unknown, missing, damaged or empty; or it is the warm-up's and questions come
        from files: nobody shows how to answer those.
        """
        if split == "warmup" and self.config.data:
            raise UserError("model.path = 'quickstart' is warmed up on generated questions: leave env.data out")
        tasks = self._split(split)
        if self._simulator is None or split != self.config.train_split:
            return tasks

        def asked(i: int) -> Task:
            task = tasks[shuffled(seed, i, len(tasks))]
            return replace(task, payload=replace(task.payload, step=i // self._per_update))

        return Endless(asked)

    def make(self) -> "SearchEnv | SearchChat":
        if self.config.style == "chat":
            return SearchChat(SearchEnv(self.config, self._search))
        numbered = self._worlds[:1] if self.config.style == "compact" else []
        names = [entity.names[0] for one in numbered for entity in one.entities]
        return SearchEnv(self.config, self._search, names)

    def fingerprint(self) -> str:
        """Hash of the questions, and of the documents where they are generated; what searches them."""
        config = self.config
        engine = f"{masked(config.retriever)}{f' {config.corpus.name}' if config.corpus else ''} top {config.topk}"
        if self._worlds:
            return f"generated {config.entities} {world.digest(self._worlds)}, {engine}"
        assert config.data is not None
        splits = (config.train_split, config.eval_split)
        files = [path for split in splits for path in data.candidates(config.data, split)]
        return f"{' '.join(f'{path.stem} {data.digest(path)}' for path in dict.fromkeys(files))}, {engine}"

    def _split(self, split: str) -> list[Task]:
        if self.config.data:
            return self._load(data.find_file(self.config.data, split))
        if split not in self._generated:
            splits = ", ".join(self._generated)
            raise UserError(f"generated questions have no split '{split}', only {splits}; name one, or set env.data")
        return self._generated[split]

    def _search(self, question: Question, query: str) -> list[Hit]:
        if self._simulator:
            return self._simulator.search(query, self.config.topk, question.step)
        return self._retriever(question.world).search([query], self.config.topk)[0]


class SearchEnv:
    """One question at a time."""

    task: str = ""

    def __init__(self, config: SearchConfig, search: Search, names: Sequence[str] = ()) -> None:
        self.config = config
        paper = PaperStyle(history=config.history, think=config.think)
        self.style: Style = {"paper": paper, "compact": CompactStyle(), "chat": ChatStyle()}[config.style]
        self._retrieve = search
        self._actions = [f"{verb}[{name}]" for verb in ("search", "answer") for name in names]
        self._done = True

    def reset(self, task: Task) -> str:
        """Start `task`, whose payload is a Question; the first observation is its text."""
        self._question: Question = task.payload
        self.task = self._question.text
        self._past: list[tuple[Action, str]] = []
        self._titles: list[set[str]] = []
        self._done = False
        return self.task

    def context(self) -> str:
        return self.style.prompt(self.task, self._past)

    def step(self, response: str) -> Outcome:
        """Search or answer; the episode ends with an answer or after env.max_turns turns, and nothing is observed then.

        Raises EnvironmentFailure: the search failed.
        """
        return self.play(*self.style.parse_action(response))

    def play(self, action: Action, valid: bool) -> Outcome:
        """A turn's action, and whether the response was well-formed."""
        assert not self._done, "step() before reset() or after the end"
        self._done = action.verb == "answer" or len(self._past) + 1 >= self.config.max_turns
        hits = self._search(action.text) if action.verb == "search" and not self._done else None
        observation = "" if hits is None else self.style.observation([hit.contents for hit in hits])
        won = action.verb == "answer" and exact_match(action.text, self._question.answers)
        self._past.append((action, observation))
        self._titles.append({title(hit.contents) for hit in hits or ()})
        reward = self.config.reward if won else 0.0
        return Outcome(observation, reward, done=self._done, won=won, action=str(action), valid=valid)

    def oracle(self) -> str:
        return self.style.format_action(self.best())

    def best(self) -> Action:
        """Search for the next document on the way to the answer that is not in the prompt yet; then answer."""
        hops = self._question.hops
        if not hops:
            raise NoOracleError("only generated questions tell how they are answered")
        shown = set().union(*self._titles[max(0, len(self._titles) - self.style.shown) :])
        found = [i for i, title in enumerate(hops) if title in shown]
        if found and found[-1] == len(hops) - 1:
            return Action("answer", self._question.answers[0])
        return Action("search", hops[found[-1] + 1 if found else 0])

    def admissible_actions(self) -> list[str]:
        """Compact style, generated questions: to search for each entity, and to answer with it. Else []."""
        return self._actions

    def format_action(self, action: str) -> str:
        """`action` is "search[query]" or "answer[text]"; anything else is played as an invalid response."""
        played = Action.parse(action)
        return self.style.format_action(played) if played.verb else action

    def _search(self, query: str) -> list[Hit]:
        if not query:  # nothing to ask for, and no server is bound to like it
            return []
        try:
            return self._retrieve(self._question, query)
        except Exception as error:  # a UserError too: it would end the whole run
            raise EnvironmentFailure(f"search failed: {describe(error)}") from error


class SearchChat(Retold):
    """The same game as a conversation: `search` is a tool, and a text without a call is the answer."""

    tools = (SEARCH,)

    def begin(self, task: Task) -> list[Message]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self._game.reset(task)}]

    def call(self, call: ToolCall) -> Outcome:
        return self._game.play(Action("search", call.arguments["query"].strip()), valid=True)

    def say(self, text: str) -> Outcome:
        return self._game.play(Action("answer", text), valid=True)

    def oracle(self) -> str:
        return self._written(self._game.best())

    def format_action(self, action: str) -> str:
        played = Action.parse(action)
        return self._written(played) if played.verb else action

    def _written(self, action: Action) -> Reply:
        if action.verb == "answer":
            return Reply.of(action.text)
        return Reply.of("", ToolCall("search", {"query": action.text}, f"call{len(self.messages):05}"))
