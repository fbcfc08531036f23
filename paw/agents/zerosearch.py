"""ZeroSearch (arXiv 2505.04588): a second LLM plays the search engine. In training its noise grows.

The LLM sees only the query. The paper's prompt also has the question and its answer, but a search
engine that knows the answer would give it away to a model that is trained on the reward. The query
and the seed decide whether the documents are noise, so repeated evaluations get the same documents.
"""

import math
import random
import re
from typing import Any

from paw.agents.endpoint import Endpoint
from paw.config.sections import RunConfig
from paw.envs.search.retrieval.base import Hit
from paw.envs.settings import SimulatorConfig
from paw.io.http import Loop
from paw.rollouts.episode import derive_seed

# After the paper's prompt.
PROMPT = (
    "You are the Google search engine.\n"
    "Given a query, you need to generate {count} {quality} documents for the query.\n"
    "Each document should contain about 30 words, and these documents should contain {quality} "
    "information.\n"
    "Begin each document with its number, 'Doc 1: ', 'Doc 2: ' and so on, and write nothing else."
    "\n\n"
    "Query: {query}\n{Quality} Output:\n"
)
LABEL = r"^\W*doc(?:ument)?\s*\d+\W*?[:.][\s*]*"
DOCUMENT = re.compile(rf"{LABEL}(.*?)(?={LABEL}|\Z)", re.I | re.M | re.S)
MAX_TOKENS = 512


class Simulator:
    """A search engine whose documents are written by an LLM. Several threads may use it at once.

    `model` has the method `complete` of Endpoint.
    """

    def __init__(self, model: Any, config: SimulatorConfig, run: RunConfig) -> None:
        self.model = model
        self.config = config
        self.run = run
        self._loop = Loop()

    def share(self, step: int | None) -> float:
        """Return the share of noise at update i of m. In evaluation (`step` None), i is 0.

        p_i = p_s + (b^(i/m) - 1) / (b - 1) (p_e - p_s)
        """
        noise_start = self.config.noise_start
        noise_end = self.config.noise_end
        noise_base = self.config.noise_base
        progress = min(1.0, (step or 0) / max(1, self.run.updates))
        rise = (noise_base**progress - 1) / (noise_base - 1)
        return noise_start + rise * (noise_end - noise_start)

    def search(self, query: str, topk: int, step: int | None = None) -> list[Hit]:
        """Return at most `topk` documents, which are useless with probability `share(step)`.

        An answer without document labels is one document. Raises EndpointError if the endpoint
        fails.
        """
        seed = derive_seed(self.run.seed, "zerosearch", query)
        is_noise = random.Random(seed).random() < self.share(step)
        quality = "noisy" if is_noise else "useful"
        prompt = PROMPT.format(
            count=topk, quality=quality, Quality=quality.capitalize(), query=query
        )
        call = self.model.complete(prompt, temperature=1.0, max_tokens=MAX_TOKENS, seed=seed)
        text = self._loop.run(call, math.inf).text  # the endpoint has its own time limits
        documents = [" ".join(document.split()) for document in DOCUMENT.findall(text) or [text]]
        non_empty = [document for document in documents if document]
        return [
            Hit(f"{quality}/{i}", contents, 1.0 / i)
            for i, contents in enumerate(non_empty[:topk], start=1)
        ]


def make_simulator(config: SimulatorConfig, run: RunConfig) -> Simulator:
    """Make the simulator of env.simulator.

    Raises UserError if its endpoint is not configured or does not answer.
    """
    endpoint = Endpoint(config, section="env.simulator")
    endpoint.check()
    return Simulator(endpoint, config, run)
