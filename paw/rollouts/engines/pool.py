"""vLLM behind HTTP: a pool of servers that answer requests and take weights.

Written for vLLM 0.32's `vllm serve --enable-scale-out` with VLLM_SERVER_DEV_MODE=1. A request sends
token ids and a seed. The response has token ids, log-probs and the weight version of each token.

Servers are not trusted. A server that does not answer in time, or answers wrongly, gets no more
requests until it has taken the next weights. Its pending requests go to another server with the
same seeds. If no server is left, requests come back as failed. The size of a response is bounded
before it is read, and each number is checked against the request before it is used.
"""

import asyncio
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from pydantic import ValidationError

from paw.config.sections import Config
from paw.distributed.ranks import Ranks
from paw.envs.checked import problem
from paw.errors import UserError, clean, describe, masked, short_repr, to_stderr
from paw.io.http import CLOSE_S, HttpClient, Loop
from paw.model.policy import DTYPES
from paw.rollouts.engines.base import Completion, EngineParts, Request
from paw.rollouts.engines.responses import (
    MAX_SPANS,
    Choice,
    EntropyResponse,
    GenerateResponse,
    TokenLogprob,
    VersionSpan,
    WrongAnswer,
    check_entropies,
    check_tokens,
    most_bytes,
    token_versions,
)
from paw.rollouts.engines.routing import Router
from paw.rollouts.engines.servers import Servers
from paw.rollouts.engines.settings import ServerConfig
from paw.rollouts.engines.transfer import AdapterTransfer, FileTransfer, NcclTransfer, Transfer
from paw.rollouts.engines.vllm_library import sampling_options, wants_entropy


@dataclass
class EntropyCall:
    """A call that asks a server for the entropies of several finished responses."""

    responses: list[tuple[str, int]]
    """(name, tokens) of each response."""
    result: asyncio.Future[list[list[float] | None]]
    """The entropies of each response, in that order."""


class Server:
    """One server as this rank sees it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = masked(url)
        """Its name in files and messages, which is the URL without a password."""
        self.fault = "it has no weights yet"
        """The reason why it gets no requests; "" if there is none."""
        self.calls: set[asyncio.Future[Completion]] = set()
        self.entropy_lock = asyncio.Lock()
        """Held during an entropy call."""
        self.next_entropy_call: EntropyCall | None = None
        """The call that is waiting for the lock. More responses may join it."""


class ServerPool:
    """The servers at `urls`, which all have the same model and only this run's weights.

    Another process, which has a `SendingPool`, sends them the weights. `expect` and `arrive` tell
    this pool about it. Each rank begins with a different server.

    Args:
        vocabulary: size of the model's vocabulary.
        timeout_s: seconds for a whole response.
        entropy: whether completions have it. The servers then need this package, see
            `vllm_command`.
        model: name under which the servers answer; "" for their only one.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        end_ids: Collection[int],
        vocabulary: int,
        timeout_s: float,
        ranks: Ranks,
        entropy: bool = False,
        model: str = "",
    ) -> None:
        first_server = ranks.rank % len(urls)
        self.servers = [
            Server(url.rstrip("/")) for url in [*urls[first_server:], *urls[:first_server]]
        ]
        self.end_ids = sorted(end_ids)
        self.vocabulary = vocabulary
        self.entropy = entropy
        self.model = model
        self.version = -1
        """Version of the weights that all servers have; -1 before the first."""
        self.pending_version = -1
        """Version of the weights on their way; if there are none, of the last that arrived."""
        self._ranks = ranks
        self.timeout_s = timeout_s
        self._router = Router()
        self._client = HttpClient("engine.type = 'server'", timeout_s=timeout_s)
        self._loop = Loop()

    @property
    def faults(self) -> dict[str, str]:
        """What is wrong with each server that gets no requests, by its URL."""
        return {server.url: server.fault for server in self.servers if server.fault}

    def submit(self, request: Request, callback: Callable[[Completion], None]) -> None:
        """Send the request. Another thread calls `callback` with the completion."""
        self._loop.start(self._serve(request, callback))

    def sync(self, weights: Any, version: int) -> None:
        raise RuntimeError("these servers get their weights from another process")

    def expect(self, version: int) -> None:
        """Note that these weights are on their way."""
        self.pending_version = version

    def arrive(self, version: int, faults: dict[str, str]) -> None:
        """Note that all servers have these weights, except those in `faults` (by URL)."""
        self.version = version
        self._router.forget()
        for server in self.servers:
            server.fault = faults.get(server.url, "")

    def close(self) -> None:
        with suppress(Exception):
            self._loop.run(self._client.close(), CLOSE_S)
        self._loop.close()

    async def _serve(self, request: Request, callback: Callable[[Completion], None]) -> None:
        """Ask one server after another until one answers."""
        while True:
            usable = [server for server in self.servers if not server.fault]
            if not usable:
                break
            loads = {server.url: len(server.calls) for server in usable}
            url = self._router.choose(request.episode, loads)
            server = next(server for server in usable if server.url == url)
            call = asyncio.ensure_future(self._ask(server, request))
            server.calls.add(call)
            try:
                completion = await asyncio.wait_for(call, self.timeout_s)
                return callback(completion)
            except TimeoutError:
                self._lose(
                    server, f"no complete answer within engine.timeout_s = {self.timeout_s:g}"
                )
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task and task.cancelling():
                    raise
                # Otherwise only the call was cancelled, because another request found a fault in
                # the server.
            except ValidationError as error:
                self._lose(server, f"not vLLM's answer: {problem(error)}")
            except Exception as error:
                self._lose(server, describe(error))
            finally:
                server.calls.discard(call)
        faults = "; ".join(f"{url}: {fault}" for url, fault in self.faults.items())
        callback(Completion(request.key, [], [], None, failure=f"no server is left ({faults})"))

    def _lose(self, server: Server, fault: str) -> None:
        """Stop sending requests to the server, and give its pending ones to others."""
        if server.fault:
            return
        server.fault = fault
        to_stderr(
            f"rank {self._ranks.rank}: {server.url} gets no requests until next weights: {fault}"
        )
        server.entropy_lock = asyncio.Lock()
        server.next_entropy_call = None
        for call in server.calls:
            call.cancel()

    async def _ask(self, server: Server, request: Request) -> Completion:
        """Return the server's response. Raises WrongAnswer if it does not fit the request."""
        oldest_version = self.version
        name = uuid4().hex if self.entropy else ""
        body: dict[str, Any] = {
            "token_ids": request.prompt_ids,
            "sampling_params": sampling_options(request, self.end_ids, name),
        }
        if self.model:
            body["model"] = self.model

        url = f"{server.url}/inference/v1/generate"
        if request.stopped:
            choice = await self._stream(url, body, request)
            cached_tokens = 0
        else:
            response = await self._generate(url, body, request)
            choice = response.choices[0]
            cached_tokens = response.cached or 0

        self._check(choice, request, cached_tokens)
        versions = self._versions(choice, oldest_version)
        entropy = None
        if self.entropy:
            entropy = await self._entropy_of(server, name, len(choice.token_ids))
        return Completion(
            key=request.key,
            token_ids=choice.token_ids,
            logp=[token.logprob for token in choice.logprobs],
            entropy=entropy,
            cached_tokens=cached_tokens,
            versions=versions,
            server=server.name,
        )

    async def _generate(self, url: str, body: dict[str, Any], request: Request) -> GenerateResponse:
        max_bytes = most_bytes(request.max_tokens)
        reply = await self._client.ask("POST", url, body, max_bytes=max_bytes)
        if reply.status != 200:
            raise WrongAnswer(f"status {reply.status}: {clean(reply.text, 200)}")
        return GenerateResponse.model_validate_json(reply.body)

    async def _stream(self, url: str, body: dict[str, Any], request: Request) -> Choice:
        """Return the response, up to the token at which `request.stopped` says it is complete.

        Then closes the connection, which makes the server stop.
        """
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        stopped = request.stopped
        version = self.version
        stream = self._client.lines(
            url,
            body | {"stream": True},
            max_line=most_bytes(request.max_tokens),
            max_bytes=most_bytes(request.max_tokens, lines=True),
        )
        async with stream as lines:
            async for line in lines:
                if len(token_ids) > request.max_tokens:
                    raise WrongAnswer("endless stream: it has more tokens than were asked for")
                if not line.startswith("data: {"):
                    continue
                response = GenerateResponse.model_validate_json(line.removeprefix("data: "))
                choice = response.choices[0]
                check_tokens(choice, self.vocabulary)
                token_ids += choice.token_ids
                logprobs += choice.logprobs
                if choice.finish_reason or (stopped and stopped(token_ids)):
                    break
        # vLLM sends the versions only at the end of a response that it finishes itself.
        spans = [VersionSpan(version=str(version), start=0, end=len(token_ids))]
        return Choice.model_construct(token_ids=token_ids, logprobs=logprobs, weight_versions=spans)

    def _check(self, choice: Choice, request: Request, cached_tokens: int) -> None:
        """Raises WrongAnswer if tokens or log-probs do not fit the request."""
        check_tokens(choice, self.vocabulary)
        token_count = len(choice.token_ids)
        same_tokens = choice.token_ids == [token.token_id for token in choice.logprobs]
        if not same_tokens or not 1 <= token_count <= request.max_tokens:
            raise WrongAnswer(
                f"{token_count} token ids with {len(choice.logprobs)} log-probs for at most "
                f"{request.max_tokens}"
            )
        if not 0 <= cached_tokens <= len(request.prompt_ids):
            raise WrongAnswer(
                f"{short_repr(cached_tokens)} cached tokens "
                f"of {len(request.prompt_ids)} in the prompt"
            )

    def _versions(self, choice: Choice, oldest_version: int) -> list[int]:
        """Return the weight version of each token. Raises WrongAnswer for an impossible one."""
        spans = choice.weight_versions or []
        versions = token_versions(spans, len(choice.token_ids))
        if not all(oldest_version <= version <= self.pending_version for version in versions):
            answered = ", ".join(span.version for span in spans[:MAX_SPANS])
            raise WrongAnswer(f"weights {answered} instead of {self.version}")
        return versions

    async def _entropy_of(self, server: Server, name: str, count: int) -> list[float] | None:
        """Return the entropies of a finished response of `count` tokens.

        One call asks for all responses that finish while the previous call is running.
        """
        entropy_call = server.next_entropy_call
        if entropy_call is None:
            responses: list[tuple[str, int]] = []
            result = asyncio.ensure_future(self._ask_entropies(server, responses))
            # An error is raised for each response below. This only marks it as retrieved.
            result.add_done_callback(lambda done: done.cancelled() or done.exception())
            entropy_call = EntropyCall(responses, result)
            server.next_entropy_call = entropy_call
        response_index = len(entropy_call.responses)
        entropy_call.responses.append((name, count))
        entropy = (await asyncio.shield(entropy_call.result))[response_index]
        if entropy is not None and len(entropy) != count:
            raise WrongAnswer(f"{len(entropy)} entropies for {count} tokens")
        return entropy

    async def _ask_entropies(
        self, server: Server, responses: list[tuple[str, int]]
    ) -> list[list[float] | None]:
        async with server.entropy_lock:
            server.next_entropy_call = None  # no more responses join this call
            body = {"method": "paw_entropy", "args": [responses]}
            max_bytes = most_bytes(sum(token_count for _, token_count in responses))
            reply = await self._client.ask(
                "POST", f"{server.url}/collective_rpc", body, max_bytes=max_bytes
            )
        if reply.status != 200:
            raise WrongAnswer(
                "it returns no entropy; it needs two more options (docs/scale.md, Entropy)"
            )
        entropies = EntropyResponse.model_validate_json(reply.body).results[0]
        if len(entropies) != len(responses):
            raise WrongAnswer(
                f"entropies of {len(entropies)} responses instead of {len(responses)}"
            )
        for entropy in entropies:
            check_entropies(entropy or (), self.vocabulary)
        return entropies


class SendingPool(ServerPool):
    """The servers at `urls`, which get their weights from this run. Rank 0 sends, and all ranks
    take part.

    Args:
        transfer: how weights are sent.
        adapters: how LoRA adapters are sent without the base weights. The base weights are then
            sent once, by `transfer`, unless the servers `have_base`.
        started: the servers, if the run has started them; set on rank 0 only.
        behind_router: the servers that take the weights, if `urls` is one router before them.
        options: keyword arguments of `ServerPool`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        transfer: Transfer,
        *,
        adapters: AdapterTransfer | None = None,
        have_base: bool = False,
        started: Servers | None = None,
        behind_router: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(urls, **options)
        self._behind_router = [url.rstrip("/") for url in behind_router]
        self._transfer = transfer
        self._adapters = adapters
        self._have_base = have_base
        self._started = started
        self.on_expected: Callable[[int], None] = lambda version: None
        """Called with the version of weights that are about to be sent."""
        self.on_arrived: Callable[[int, dict[str, str]], None] = lambda version, faults: None
        """Called with the version that servers have, and the faults of those without it."""

    def sync(self, weights: Any, version: int) -> None:
        """Send every parameter from rank 0 to every server, including those that failed before.

        Every rank must call this. Raises UserError if a server does not take the first weights, or
        later ones while a router keeps sending it requests.
        """
        self.expect(version)
        if self._ranks.first and self._started:
            for line in self._started.revive():
                to_stderr(line)

        faults: dict[str, str] = {}
        if self._adapters is None:
            faults |= self._send(self._transfer, weights, version, faults)
        else:
            if not self._have_base:
                faults |= self._send(self._transfer, weights.base, version, faults)
            faults |= self._send(self._adapters, weights.adapters, version, faults)
        self._have_base = True

        faults = self._ranks.broadcast_from_rank0(lambda: faults)
        for url, fault in faults.items():
            if self.version < 0:  # nothing has been sampled yet, so the settings are wrong
                raise UserError(
                    f"engine.urls: {url}: {fault}; docs/scale.md says how to start a server"
                )
            if self._behind_router:
                raise UserError(
                    f"engine.urls: {url} has not taken the weights of update {version}: {fault}; "
                    "engine.router would keep sending it requests: remove it there, or restart it"
                )
            if self._ranks.first:
                to_stderr(f"{url} did not take the weights of update {version}: {fault}")
        self.arrive(version, faults)

    def _send(
        self, transfer: Transfer, weights: Any, version: int, faults: dict[str, str]
    ) -> dict[str, str]:
        """Send to the servers not in `faults`. Returns what went wrong, by URL, on rank 0."""
        if self._ranks.first:
            urls = self._behind_router or [server.url for server in self.servers]
            reachable = [url for url in urls if url not in faults]
            return transfer.send(weights, reachable, version)
        for _ in weights:
            pass  # gathering the weights takes all ranks
        return {}

    def expect(self, version: int) -> None:
        super().expect(version)
        self.on_expected(version)

    def arrive(self, version: int, faults: dict[str, str]) -> None:
        super().arrive(version, faults)
        self.on_arrived(version, faults)

    def close(self) -> None:
        super().close()
        self._transfer.close()
        if self._adapters:
            self._adapters.close()


def open_pool(parts: EngineParts) -> SendingPool:
    """Open the servers of engine.urls, or those that rank 0 has started, and wait for them.

    Every rank must call this. Raises UserError for a server that does not come up.
    """
    config = parts.config
    settings = cast(ServerConfig, config.engine)
    ranks = parts.ranks
    started: Servers | None = parts.started

    def wait_for_urls() -> list[str]:
        if not started:
            return settings.urls
        started.wait()
        return started.urls

    urls = ranks.broadcast_from_rank0(wait_for_urls)
    adapters = None
    served_model = ""
    transfer = _make_transfer(config, settings, urls, parts.policy.device)
    if parts.lora:
        adapters = AdapterTransfer(
            DTYPES[config.model.dtype], settings.timeout_s, settings.weights_dir, parts.lora
        )
        served_model = ranks.broadcast_from_rank0(lambda: adapters.model)
    router = settings.router
    if router and wants_entropy(config):
        raise UserError(
            "engine.router: only the server that sampled a response has its entropies, and a "
            "router does not say which; use --wm.entropy sampled or --policy.old_logp trainer"
        )
    return SendingPool(
        [router] if router else urls,
        transfer,
        behind_router=urls if router else (),
        adapters=adapters,
        have_base=settings.servers > 0,
        started=started,
        end_ids=parts.end_ids,
        vocabulary=len(parts.policy.head_weight),
        timeout_s=settings.timeout_s,
        ranks=ranks,
        entropy=wants_entropy(config),
        model=served_model,
    )


def _make_transfer(
    config: Config, settings: ServerConfig, urls: Sequence[str], device: torch.device
) -> Transfer:
    """Return how the base weights, or all weights, are sent."""
    dtype = DTYPES[config.model.dtype]
    if settings.transfer == "files" or (settings.transfer == "auto" and device.type != "cuda"):
        return FileTransfer(dtype, settings.timeout_s, settings.weights_dir)
    address = "127.0.0.1"
    on_this_machine = all(urlsplit(url).hostname in ("127.0.0.1", "localhost") for url in urls)
    if not on_this_machine:
        address = socket.gethostbyname(socket.gethostname())
    return NcclTransfer(dtype, settings.timeout_s, address)
