"""Search engines. `make_retriever` makes the one that the configuration names."""

from paw.envs.search.retrieval.base import Documents, Retriever
from paw.envs.search.retrieval.bm25 import Bm25Retriever
from paw.envs.search.retrieval.corpus import Corpus
from paw.envs.search.retrieval.remote import RemoteRetriever
from paw.envs.settings import SearchConfig
from paw.errors import UserError


def make_retriever(config: SearchConfig, documents: Documents | None = None) -> Retriever:
    """Make the retriever that `env.retriever` names, over `env.corpus` or else `documents`.

    An index is built if there is none. Raises UserError if there are no documents.
    """
    if config.retriever.startswith("http"):
        return RemoteRetriever(config.retriever, timeout_s=config.timeout_s)
    if config.corpus is not None:
        documents = Corpus(config.corpus)
    if not documents:
        raise UserError(
            f"env.retriever = '{config.retriever}' needs documents: name a file with --env.corpus"
        )
    if config.retriever == "dense":
        from paw.envs.search.retrieval.dense import DenseRetriever  # imports torch

        return DenseRetriever(documents, config.encoder)
    return Bm25Retriever(documents)
