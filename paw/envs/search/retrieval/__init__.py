"""Search engines, and the way to the one that the configuration names."""

from paw.envs.search.retrieval.base import Documents, Hit, Retriever
from paw.envs.settings import SearchConfig
from paw.errors import UserError

__all__ = ["Documents", "Hit", "Retriever", "make_retriever"]


def make_retriever(config: SearchConfig, documents: Documents | None = None) -> Retriever:
    """The retriever that `env.retriever` names, over `env.corpus`, else over `documents`.

    Indexes what is not indexed yet. UserError if a package, the corpus or the server is missing.
    """
    if config.retriever.startswith("http"):
        from paw.envs.search.retrieval.remote import RemoteRetriever

        return RemoteRetriever(config.retriever, timeout_s=config.timeout_s)
    if config.retriever == "zerosearch":
        raise UserError("env.retriever = 'zerosearch' is an LLM that plays the search engine: there is no index")
    if config.corpus is not None:
        from paw.envs.search.retrieval.corpus import Corpus

        documents = Corpus(config.corpus)
    if not documents:
        raise UserError(f"env.retriever = '{config.retriever}' needs documents: name a file with --env.corpus")
    if config.retriever == "dense":
        from paw.envs.search.retrieval.dense import DenseRetriever

        return DenseRetriever(documents, config.encoder)
    from paw.envs.search.retrieval.bm25 import Bm25Retriever

    return Bm25Retriever(documents)
