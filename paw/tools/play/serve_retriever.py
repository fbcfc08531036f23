"""`paw serve retriever`: serves a corpus over the HTTP interface of Search-R1's retriever."""

import argparse
from typing import Any

from paw.config.recipe import load
from paw.envs.search.retrieval.server import serve


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Serve `options.corpus`, or the generated world, until Ctrl-C or SIGTERM. Returns 0."""
    keys = {"env.data": "none", "env.retriever": options.retriever}
    if options.corpus:
        keys["env.corpus"] = options.corpus
    config: Any = load("search-grpo", keys | overrides)
    return serve(config.env, host=options.host, port=options.port)
