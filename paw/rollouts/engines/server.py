"""vLLM behind HTTP: requests go to servers, finished ones come back through a queue.

Written for vLLM 0.32's `vllm serve --enable-scale-out` with VLLM_SERVER_DEV_MODE=1: token ids and a
seed in; token ids, log-probs and the version of the weights of each token out. A server is trusted
with little: one that does not answer in time, or answers wrongly, is given nothing more until it
has taken the next weights, and the requests it held go to another one with the same seeds. Where
none is left, requests come back as failed. What it sends is bounded before it is read, and each
number is held against what was asked before it is used.
"""

import asyncio
import queue
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from pydantic import ValidationError

from paw.config import Config, LoraConfig
from paw.envs.checked import problem
from paw.envs.http import CLOSE_S, HttpClient, Loop
from paw.errors import UserError, clean, describe, masked, shown, to_stderr
from paw.model.policy import DTYPES
from paw.model.ranks import Ranks
from paw.rollouts.engines.answers import (
    SPANS,
    Answer,
    Choice,
    Entropies,
    Span,
    Spot,
    WrongAnswer,
    check_entropies,
    check_tokens,
    most_bytes,
    token_versions,
)
from paw.rollouts.engines.base import Completion, Engine, Request
from paw.rollouts.engines.servers import Servers
from paw.rollouts.engines.transfer import AdapterTransfer, FileTransfer, NcclTransfer, Transfer
from paw.rollouts.engines.vllm import sampling_options

LOOK_S = 0.02
"""How long `step` waits for an answer, before agents and environments have their turn."""


class Server:
    """One server as this rank sees it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = masked(url)
        """By which files and lines call it."""
        self.fault = "it has no weights yet"
        """Why it is given nothing; "" where it is well."""
        self.calls: set[asyncio.Future[Completion]] = set()
        self.asking = asyncio.Lock()
        """Held while it is asked for entropies."""
        self.asked: tuple[list[tuple[str, int]], asyncio.Future[Any]] | None = None
        """What the next such call asks for."""


class Fleet:
    """The servers at `urls`, of one model and of this run's weights alone; each rank begins with another one of them.

    `vocabulary` is how many tokens the model has. `timeout_s` is for a whole answer. `started`:
    those of them that the run has started. `entropy`: completions have it; the servers need this
    package for that, see `vllm_command`. `adapters`: how LoRA's are sent, alone but for the first
    time, when `transfer` sends the base weights, where the servers do not `have_base`. Without
    `transfer` another fleet sends the weights, LoRA's by the name `model`, and `expect` and
    `arrive` say how far they are.
    """

    def __init__(
        self,
        urls: Sequence[str],
        transfer: Transfer | None,
        *,
        end_ids: Collection[int],
        vocabulary: int,
        timeout_s: float,
        ranks: Ranks,
        started: Servers | None = None,
        entropy: bool = False,
        adapters: AdapterTransfer | None = None,
        have_base: bool = False,
        model: str = "",
    ) -> None:
        first = ranks.rank % len(urls)
        self.servers = [Server(url.rstrip("/")) for url in [*urls[first:], *urls[:first]]]
        self.version = self.coming = -1
        """Of the weights that all servers have, and of those on their way."""
        self._transfer, self._ranks, self._timeout_s, self._started = (
            transfer,
            ranks,
            timeout_s,
            started,
        )
        self.end_ids, self.entropy = sorted(end_ids), entropy
        self.vocabulary = vocabulary
        self._adapters, self._have_base = adapters, have_base
        self.model = ranks.broadcast_from_rank0(lambda: adapters.model) if adapters else model
        self.tell: Callable[..., None] = lambda *_: None
        """Hears of calls of `expect` and `arrive`."""
        self._client = HttpClient("engine.type = 'server'", timeout_s=timeout_s)
        self._loop = Loop()

    @property
    def faults(self) -> dict[str, str]:
        """What is wrong with each server that is given nothing, by its URL."""
        return {server.url: server.fault for server in self.servers if server.fault}

    def submit(self, request: Request, answer: Callable[[Completion], None]) -> None:
        """Have the request answered; `answer` is called in another thread."""
        self._loop.begin(self._serve(request, answer))

    def sync(self, weights: Any, version: int) -> None:
        """Send every parameter from rank 0 to every server, those that failed before too; takes all ranks."""
        self.expect(version)
        faults: dict[str, str] = {}
        parts: list[tuple[Transfer | None, Any]] = [(self._transfer, weights)]
        if self._adapters:
            parts = [] if self._have_base else [(self._transfer, weights.base)]
            parts.append((self._adapters, weights.adapters))
        if self._ranks.first and self._started:
            for line in self._started.revive():
                to_stderr(line)
        for transfer, part in parts:
            if self._ranks.first and transfer:
                faults |= transfer.send(
                    part, [s.url for s in self.servers if s.url not in faults], version
                )
            else:
                for _ in part:
                    pass  # gathering them takes all ranks
        self._have_base = True
        faults = self._ranks.broadcast_from_rank0(lambda: faults)
        for url, fault in faults.items():
            if self.version < 0:  # nothing has been sampled yet: a mistake
                raise UserError(
                    f"engine.urls: {url}: {fault}; docs/scale.md says how a server is started"
                )
            if self._ranks.first:
                to_stderr(f"{url} has not taken the weights of update {version}: {fault}")
        self.arrive(version, faults)

    def expect(self, version: int) -> None:
        """These weights are on their way."""
        self.coming = version
        self.tell("expect", version)

    def arrive(self, version: int, faults: dict[str, str]) -> None:
        """All servers have them but those with `faults`, by their URLs."""
        self.version = version
        for server in self.servers:
            server.fault = faults.get(server.url, "")
        self.tell("arrive", version, faults)

    def close(self) -> None:
        with suppress(Exception):
            self._loop.run(self._client.close(), CLOSE_S)
        self._loop.close()
        for transfer in filter(None, (self._transfer, self._adapters)):
            transfer.close()

    async def _serve(self, request: Request, answer: Callable[[Completion], None]) -> None:
        """Have one server after the other try, until one answers."""
        while well := [server for server in self.servers if not server.fault]:
            server = min(well, key=lambda server: len(server.calls))
            call = asyncio.ensure_future(self._ask(server, request))
            server.calls.add(call)
            try:
                return answer(await asyncio.wait_for(call, self._timeout_s))
            except TimeoutError:
                self._lose(server, f"no whole answer within engine.timeout_s = {self._timeout_s:g}")
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task and task.cancelling():
                    raise
                # Else the call alone was: another request has found out what is wrong with the
                # server.
            except ValidationError as error:
                self._lose(server, f"not vLLM's answer: {problem(error)}")
            except Exception as error:
                self._lose(server, describe(error))
            finally:
                server.calls.discard(call)
        faults = "; ".join(f"{url}: {fault}" for url, fault in self.faults.items())
        answer(Completion(request.key, [], [], None, failure=f"no server is left ({faults})"))

    def _lose(self, server: Server, fault: str) -> None:
        if not server.fault:
            server.fault = fault
            to_stderr(
                f"rank {self._ranks.rank}: {server.url} is left out until the next weights: {fault}"
            )
            server.asking, server.asked = asyncio.Lock(), None
            for call in server.calls:
                call.cancel()

    async def _ask(self, server: Server, request: Request) -> Completion:
        since = self.version
        name = uuid4().hex if self.entropy else ""
        parameters = sampling_options(request, self.end_ids, name)
        body: dict[str, Any] = {"token_ids": request.prompt_ids, "sampling_params": parameters}
        if self.model:
            body["model"] = self.model
        url = f"{server.url}/inference/v1/generate"
        cached = 0
        if request.stopped:
            choice = await self._stream(url, body, request)
        else:
            most = most_bytes(request.max_tokens)
            reply = await self._client.ask("POST", url, body, max_bytes=most)
            if reply.status != 200:
                raise WrongAnswer(f"status {reply.status}: {clean(reply.text, 200)}")
            answer = Answer.model_validate_json(reply.body)
            choice = answer.choices[0]
            cached = answer.cached or 0
        ids = choice.token_ids
        spots = choice.spots
        check_tokens(choice, self.vocabulary)
        if ids != [spot.token_id for spot in spots] or not 1 <= len(ids) <= request.max_tokens:
            raise WrongAnswer(
                f"{len(ids)} token ids with {len(spots)} log-probs for at most {request.max_tokens}"
            )
        if not 0 <= cached <= len(request.prompt_ids):
            raise WrongAnswer(
                f"{shown(cached)} cached tokens of {len(request.prompt_ids)} in the prompt"
            )
        spans = choice.weight_versions or []
        versions = token_versions(spans, len(ids))
        if not all(since <= version <= self.coming for version in versions):
            named = ", ".join(span.version for span in spans[:SPANS])
            raise WrongAnswer(f"weights {named} in place of {self.version}")
        entropy = None
        if self.entropy:
            entropy = await self._entropy_of(server, name, len(ids))
            if entropy is not None and len(entropy) != len(ids):
                raise WrongAnswer(f"{len(entropy)} entropies for {len(ids)} tokens")
        logp = [spot.logprob for spot in spots]
        return Completion(
            request.key,
            ids,
            logp,
            entropy,
            cached_tokens=cached,
            versions=versions,
            server=server.name,
        )

    async def _entropy_of(self, server: Server, name: str, count: int) -> list[float] | None:
        """The entropies of a finished response.

        One call asks for all that finish while the one before is under way.
        """
        if server.asked is None:
            asked: list[tuple[str, int]] = []
            server.asked = asked, asyncio.ensure_future(self._entropies(server, asked))
            server.asked[1].add_done_callback(lambda call: call.cancelled() or call.exception())
        asked, call = server.asked
        asked.append((name, count))
        place = len(asked) - 1
        return (await asyncio.shield(call))[place]

    async def _entropies(
        self, server: Server, asked: list[tuple[str, int]]
    ) -> list[list[float] | None]:
        async with server.asking:
            server.asked = None
            call = {"method": "paw_entropy", "args": [asked]}
            most = most_bytes(sum(count for _, count in asked))
            reply = await self._client.ask(
                "POST", f"{server.url}/collective_rpc", call, max_bytes=most
            )
        if reply.status != 200:
            raise WrongAnswer(
                "it gives no entropy: it needs two more options (docs/scale.md, Entropy)"
            )
        responses = Entropies.model_validate_json(reply.body).results[0]
        if len(responses) != len(asked):
            raise WrongAnswer(f"entropies of {len(responses)} responses in place of {len(asked)}")
        for response in responses:
            check_entropies(response or (), self.vocabulary)
        return responses

    async def _stream(self, url: str, body: dict[str, Any], request: Request) -> Choice:
        """The response up to where `request.stopped` says that it is complete; the server hears it
        from the connection, which is closed."""
        ids: list[int] = []
        spots: list[Spot] = []
        stopped = request.stopped
        since = self.version
        max_line = most_bytes(request.max_tokens)
        max_bytes = most_bytes(request.max_tokens, lines=True)
        asked = self._client.lines(
            url, body | {"stream": True}, max_line=max_line, max_bytes=max_bytes
        )
        async with asked as lines:
            async for line in lines:
                if len(ids) > request.max_tokens:
                    raise WrongAnswer(
                        "a stream without end: it has more tokens than were asked for"
                    )
                if not line.startswith("data: {"):
                    continue
                choice = Answer.model_validate_json(line.removeprefix("data: ")).choices[0]
                check_tokens(choice, self.vocabulary)
                ids += choice.token_ids
                spots += choice.spots
                if choice.finish_reason or (stopped and stopped(ids)):
                    break
        spans = [
            Span(version=str(since), start=0, end=len(ids))
        ]  # told at the end of whole ones alone
        return Choice.model_construct(token_ids=ids, spots=spots, weight_versions=spans)


class ServerEngine(Engine):
    """The servers of a fleet as an engine; several may share them."""

    continuous = checkpoint_names = True

    def __init__(self, fleet: Fleet, max_model_len: int) -> None:
        super().__init__(max_model_len)
        self.fleet = fleet
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()

    @property
    def version(self) -> int:  # type: ignore[override]
        """-1 until the first `sync`."""
        return self.fleet.version

    @property
    def faults(self) -> dict[str, str]:
        return self.fleet.faults

    def submit(self, request: Request) -> None:
        if self.version < 0:
            raise RuntimeError("the engine has no weights: call sync first")
        super().submit(request)
        self.fleet.submit(request, self._done.put)

    def step(self) -> list[Completion]:
        """The requests that have finished; waits a moment for the first."""
        found: list[Completion] = []
        with suppress(queue.Empty):
            found.append(self._done.get(timeout=LOOK_S))
            while True:
                found.append(self._done.get_nowait())
        return [completion for completion in found if self._requests.pop(completion.key, None)]

    def sync(self, parameters: Any, version: int) -> None:
        """Requests may be pending: what they go on with is sampled from the new weights."""
        self.fleet.sync(parameters, version)

    def leave_out(self, servers: Collection[str]) -> bool:
        others = [server for server in self.fleet.servers if server.name not in servers]
        self.fleet.servers = others or self.fleet.servers
        return bool(others)

    def sleep(self) -> None:
        """Nothing: the servers have devices of their own."""

    def close(self) -> None:
        super().close()
        self.fleet.close()


def open_fleet(
    config: Config,
    end_ids: Collection[int],
    device: torch.device,
    ranks: Ranks,
    servers: Servers | None,
    *,
    vocabulary: int,
    entropy: bool,
    lora: LoraConfig | None,
) -> Fleet:
    """The servers of engine.urls, or those that rank 0 has started, once they answer; a call of all ranks.

    Raises UserError for one that does not come up.
    """
    options = config.engine

    def urls() -> list[str]:
        if servers:
            servers.wait()
        return servers.urls if servers else options.urls

    found = ranks.broadcast_from_rank0(urls)
    dtype = DTYPES[config.model.dtype]
    if options.transfer == "nccl" or (options.transfer == "auto" and device.type == "cuda"):
        here = all(urlsplit(url).hostname in ("127.0.0.1", "localhost") for url in found)
        address = "127.0.0.1" if here else socket.gethostbyname(socket.gethostname())
        transfer: Transfer = NcclTransfer(dtype, options.timeout_s, address)
    else:
        transfer = FileTransfer(dtype, options.timeout_s, options.weights_dir)
    adapters = lora and AdapterTransfer(dtype, options.timeout_s, options.weights_dir, lora)
    own: Any = {"entropy": entropy, "adapters": adapters, "have_base": options.servers > 0}
    return Fleet(
        found,
        transfer,
        end_ids=end_ids,
        vocabulary=vocabulary,
        timeout_s=options.timeout_s,
        ranks=ranks,
        started=servers,
        **own,
    )
