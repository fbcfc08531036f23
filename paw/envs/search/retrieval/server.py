"""`paw serve retriever`: a retriever behind HTTP, for clients of Search-R1 and verl-agent, and for
`RemoteRetriever`."""

from paw.envs.search.retrieval import make_retriever
from paw.envs.search.retrieval.base import Documents
from paw.envs.search.retrieval.corpus import Corpus
from paw.envs.search.world import World
from paw.envs.settings import SearchConfig
from paw.errors import UserError
from paw.io.serving import listen, make_server, run_server


def serve(search: SearchConfig, *, host: str, port: int) -> int:
    """Serve `env.corpus`, or the generated world, until Ctrl-C or SIGTERM; returns 0."""
    try:
        from paw.envs.search.retrieval.app import make_app  # needs fastapi

        if search.retriever not in ("bm25", "dense"):
            raise UserError(
                f"paw serve retriever: '{search.retriever}' is not an index; "
                "use --retriever bm25 or dense"
            )
        listener, url = listen(host, port, "paw serve retriever")
        if search.corpus:
            documents: Documents = Corpus(search.corpus)
        else:
            documents = World(search.entities, numbered=search.style == "compact").documents
        retriever = make_retriever(search.model_copy(update={"corpus": None}), documents)
        app = make_app(retriever, search, documents=len(documents))
    except ImportError as error:
        raise UserError(f"a server needs {error.name}: pip install 'paw-trainer[search]'") from None
    source = search.corpus or "the generated world"
    banner = f"{url}: {len(documents):,} documents of {source}, {search.retriever}"
    return run_server(make_server(app, timeout_s=search.timeout_s), listener, banner)
