"""The gateway program: it answers the HTTP requests of agents with tokens that the trainer samples.

    python -P -m rollout.episodes.gateway FD

FD is one end of a socket pair, and the trainer holds the other one; link.py describes the messages.
An agent's API key names its episode. Chat templates and parsers run here, so that they do not delay
vLLM's steps. The gateway ends when the trainer closes its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from config import InputError
from data.chat.tokenizer import ChatTokenizer
from rollout.episodes import replies
from rollout.episodes.episode import Episode, Terms
from rollout.episodes.link import TrainerLink
from rollout.episodes.parsing import NONE, Reply, ReplyParser, guess_tool_parser
from rollout.episodes.rendering import Renderer, Session
from rollout.episodes.replies import Sampled
from rollout.episodes.requests import (
    ChatRequest,
    RequestError,
    Sampling,
    read_chat_request,
    read_generate_request,
    read_reward,
)
from rollout.episodes.stability import describe_stability
from rollout.grading.program import ignore_signals
from rollout.texts import find_stop

HOST = "127.0.0.1"
# Keep idle connections open for a day, since a client may wait long for a tool.
KEEP_ALIVE_SECONDS = 86400
LIMIT = "episode_limit"
# An agent's request may overtake the trainer's message that announces its key.
NUM_LOOKS = 10
SECONDS_BETWEEN_LOOKS = 0.05
CLIENT_CLOSED_REQUEST = 499


def main(descriptor: int) -> None:
    """Serve until the trainer closes its end of the socket."""
    ignore_signals()
    asyncio.run(serve(descriptor))


async def serve(descriptor: int) -> None:
    """Start the HTTP server, and act on the trainer's messages."""
    link = await TrainerLink.connect(descriptor)
    settings = await link.receive()
    if settings is None:
        return
    try:
        gateway = Gateway(link, settings)
    except InputError as error:
        link.send({"error": str(error)})
        await link.writer.drain()
        return
    listener = socket.create_server((HOST, 0), backlog=2048)
    server = Server(
        uvicorn.Config(
            gateway.application(),
            lifespan="off",
            ws="none",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
    )
    serving = asyncio.create_task(server.serve([listener]))
    serving.add_done_callback(lambda _: os._exit(1))
    link.send({"ready": listener.getsockname()[1], "notices": gateway.notices})
    while (message := await link.receive()) is not None:
        gateway.handle(message)
    # Exit at once: the server would wait for open requests, which can no longer be answered.
    os._exit(0)


class Server(uvicorn.Server):
    """A server that leaves signals alone: the trainer handles them."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


@dataclass(frozen=True)
class Turn:
    """The request for a turn, which is sent to the trainer.

    Attributes:
        max_tokens: the maximum that the client requests, or None.
        num_tools: the number of tools that the model may call.
    """

    prompt_ids: list[int]
    max_tokens: int | None
    stop: list[str]
    num_tools: int = 0


class Gateway:
    """The routes, and the episodes.

    Attributes:
        episodes: by their API keys.
        notices: lines for the user.

    Raises:
        InputError: the settings are wrong.
    """

    def __init__(self, link: TrainerLink, settings: dict):
        self.link = link
        self.max_model_len: int = settings["max_model_len"]
        self.chat = load_chat(settings)
        self.renderer = Renderer(
            self.chat, settings.get("special_tokens_in_text"), settings["template_kwargs"]
        )
        self.end_ids = self.chat.end_ids | set(settings["stop_token_ids"])
        # A model may have more tokens than its tokenizer has names for.
        self.vocabulary_size: int = settings["vocab_size"]
        self.episodes: dict[str, Episode] = {}
        self.notices: list[str] = []
        self.parser = self._choose_parser(settings)
        if self.chat.tokenizer.chat_template:
            self.notices.append(describe_stability(self.renderer))

    def _choose_parser(self, settings: dict) -> ReplyParser:
        """Return the parser of replies, and add notices about it."""
        tool_parser = settings["tool_parser"]
        reasoning_parser = settings["reasoning_parser"]
        is_checked = bool(reasoning_parser) or tool_parser not in (None, NONE)
        if tool_parser is None:
            tool_parser = guess_tool_parser(str(self.chat.tokenizer.chat_template or ""))
            origin = "guessed from the chat template"
            if tool_parser is None:
                origin = "the chat template shows no known format of tool calls; they stay text"
            self.notices.append(f"rollout.tool_parser={tool_parser or NONE}: {origin}")
        return ReplyParser(
            self.chat.tokenizer,
            None if tool_parser == NONE else tool_parser,
            None if reasoning_parser == NONE else reasoning_parser,
            is_checked,
        )

    def application(self) -> Starlette:
        """Return the HTTP application with all routes."""
        return Starlette(
            routes=[
                Route("/v1/models", self.respond(self.models), methods=["GET"]),
                Route("/v1/chat/completions", self.respond(self.chat_turn), methods=["POST"]),
                Route("/inference/v1/generate", self.respond(self.generate), methods=["POST"]),
                Route("/v1/rewards", self.respond(self.reward), methods=["POST"]),
            ]
        )

    def handle(self, message: dict) -> None:
        """Act on a message of the trainer."""
        if "begin" in message:
            self.begin(message)
        elif "end" in message:
            self.end(set(message["end"]))
            self.link.send({"ended": message["number"]})
        else:
            self.link.answer(message)

    def begin(self, message: dict) -> None:
        """Accept more API keys."""
        sampling = Sampling(**message["sampling"], section=message["section"])
        terms = Terms(sampling, message["max_turns"], message["max_episode_tokens"])
        for key in message["begin"]:
            new_episode = Episode(key, Session(self.renderer), terms)
            self.episodes.setdefault(key, new_episode).terms = terms

    def end(self, keys: set[str]) -> None:
        """Forget episodes."""
        for key in keys:
            self.episodes.pop(key, None)
        self.link.fail_pending(keys, episode_is_over)

    # ---- the routes ----

    def respond(self, answer: Callable[[Request, Episode], Awaitable[dict]]):
        """Return a route that finds the request's episode, and answers in JSON."""

        async def route(request: Request) -> Response:
            try:
                return JSONResponse(await answer(request, await self.episode_of(request)))
            except ClientGoneError:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            except RequestError as error:
                content = replies.error(str(error), error.kind, error.code)
                return JSONResponse(content, status_code=error.status)
            except InputError as error:
                content = replies.error(str(error), "invalid_request_error", None)
                return JSONResponse(content, status_code=400)

        return route

    async def episode_of(self, request: Request) -> Episode:
        """Return the episode that a request's API key names.

        Raises:
            RequestError: there is none.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_key = scheme.lower() == "bearer" and key
        for _ in range(NUM_LOOKS if is_key else 0):
            if key in self.episodes:
                return self.episodes[key]
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
        raise RequestError(
            "the API key names no episode that is being played: use llm.api_key",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )

    async def models(self, request: Request, episode: Episode) -> dict:
        return replies.models()

    async def reward(self, request: Request, episode: Episode) -> dict:
        """Pass on a reward for the last turn that has ended."""
        reward = read_reward(await read_body(request))
        if not episode.num_ended:
            raise RequestError("no turn has ended yet, so there is nothing to reward")
        self.tell(episode, {"reward": reward})
        return {}

    async def generate(self, request: Request, episode: Episode) -> dict:
        """Sample tokens that continue a prompt of token ids."""
        fields = read_generate_request(
            await read_body(request), episode.terms.sampling, self.vocabulary_size, self.end_ids
        )
        turn = Turn(fields.token_ids, fields.max_tokens, fields.stop)
        sampled = await self.sample(request, episode, turn)
        return replies.generation(sampled, fields.has_logprobs)

    async def chat_turn(self, request: Request, episode: Episode) -> dict:
        """Sample a reply to messages."""
        if not self.chat.tokenizer.chat_template:
            raise RequestError(
                "the tokenizer has no chat template: set data.chat_template, or use llm.generate()"
            )
        fields = read_chat_request(await read_body(request), episode.terms.sampling)
        inputs = self.renderer.inputs(fields.tools, fields.template_kwargs)
        offered = fields.tools if fields.may_call else None
        if self.parser.is_needed(offered):
            self.parser.chat_request(offered)  # rejects malformed tools before the turn
        prompt = episode.session.prompt(fields.messages, inputs)
        turn = Turn(prompt.ids, fields.max_tokens, fields.stop, len(fields.tools or ()))
        sampled = await self.sample(request, episode, turn)
        text = self.text_of(sampled, fields.stop)
        reply = self.parser.parse(
            text, sampled.token_ids, len(prompt.ids), offered, inputs.arguments
        )
        episode.session.record(fields.messages, prompt, reply.message, sampled.token_ids)
        self.report(episode, fields, reply)
        logprobs = None
        if fields.has_logprobs:
            texts = [self.chat.decode([token]) for token in sampled.token_ids]
            logprobs = replies.chat_logprobs(sampled, texts)
        return replies.chat_completion(sampled, reply.message, logprobs)

    def report(self, episode: Episode, fields: ChatRequest, reply: Reply) -> None:
        """Send the conversation to the trainer, for the records."""
        self.tell(
            episode,
            {
                "messages": [*fields.messages, reply.message],
                "tool_calls": reply.num_tool_calls,
                "tool_errors": reply.num_tool_errors,
            },
        )

    def tell(self, episode: Episode, message: dict) -> None:
        """Send a message about an episode to the trainer, unless it has forgotten the episode.

        Raises:
            RequestError: the episode is over.
        """
        self.check_is_played(episode)
        self.link.send({"episode": episode.key, **message})

    def check_is_played(self, episode: Episode) -> None:
        """Raise RequestError if an episode has ended since its request arrived."""
        if self.episodes.get(episode.key) is not episode:
            raise episode_is_over()

    def text_of(self, sampled: Sampled, stop: list[str]) -> str:
        """Return the text of a reply without its end token or stop string."""
        ids = sampled.token_ids
        if sampled.finish_reason == "stop" and ids and ids[-1] in self.end_ids:
            return self.chat.decode(ids[:-1])
        text = self.chat.decode(ids)
        end = find_stop(text, stop) if sampled.finish_reason == "stop" else None
        return text if end is None else text[:end]

    # ---- turns ----

    async def sample(self, request: Request, episode: Episode, turn: Turn) -> Sampled:
        """Have the trainer sample a turn.

        Raises:
            RequestError: a limit of the episode is reached, or the episode is over.
            ClientGoneError: the client has closed the connection.
        """
        max_tokens = await self.reserve(episode, turn)
        try:
            return await self.sample_at_most(max_tokens, request, episode, turn)
        finally:
            async with episode.turn_ended:
                episode.num_reserved -= max_tokens
                episode.turn_ended.notify_all()

    async def sample_at_most(
        self, max_tokens: int, request: Request, episode: Episode, turn: Turn
    ) -> Sampled:
        """Have the trainer sample a turn of at most this many tokens."""
        number, answer = self.link.request(
            episode.key,
            {
                "prompt_ids": turn.prompt_ids,
                "max_tokens": max_tokens,
                "stop": turn.stop,
                "num_tools": turn.num_tools,
            },
        )
        gone = asyncio.create_task(disconnection(request))
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():
            self.link.abort(number)
            raise ClientGoneError
        message = answer.result()
        if message["finish_reason"] == "abort":
            raise RequestError("the trainer has aborted the request", 503, "aborted")
        episode.num_ended += 1
        episode.num_sampled += len(message["token_ids"])
        return Sampled(
            number,
            turn.prompt_ids,
            message["token_ids"],
            message["log_probs"],
            message["finish_reason"],
        )

    async def reserve(self, episode: Episode, turn: Turn) -> int:
        """Begin a turn: return how many tokens it may have, and reserve them.

        If an agent asks for several turns at once, those that are being sampled may use up the
        tokens that this one needs. It then waits for them to end.

        Raises:
            RequestError: a limit of the episode is reached, or the episode is over.
        """
        own_limit = self.limit_of_turn(episode, turn)
        async with episode.turn_ended:
            await episode.turn_ended.wait_for(
                lambda: not episode.num_reserved or own_limit <= self.tokens_left(episode)
            )
            self.check_is_played(episode)
            self.check_turns(episode)
            max_tokens = min(own_limit, self.tokens_left(episode))
            if max_tokens < 1:
                message = (
                    f"{episode.num_sampled} tokens were sampled in the episode, and "
                    f"rollout.max_episode_tokens={episode.terms.max_episode_tokens}"
                )
                self.raise_limit(episode, "max_episode_tokens", message)
            episode.num_turns += 1
            episode.num_reserved += max_tokens
        return max_tokens

    def check_turns(self, episode: Episode) -> None:
        """Raise RequestError if the episode has had all of its turns."""
        max_turns = episode.terms.max_turns
        if max_turns is not None and episode.num_turns >= max_turns:
            message = f"the episode has had {max_turns} turns, which is rollout.max_turns"
            self.raise_limit(episode, "max_turns", message)

    def limit_of_turn(self, episode: Episode, turn: Turn) -> int:
        """Return how many tokens a turn may have if rollout.max_episode_tokens does not limit it.

        Raises:
            RequestError: the prompt fills the model's context.
        """
        room = self.max_model_len - len(turn.prompt_ids)
        if room < 1:
            message = (
                f"the model's maximum context length is {self.max_model_len} tokens, and the "
                f"prompt has {len(turn.prompt_ids)}"
            )
            self.raise_limit(episode, "max_model_len", message)
        limits = [room, episode.terms.sampling.max_tokens]
        if turn.max_tokens is not None:
            limits.append(turn.max_tokens)
        return min(limits)

    def tokens_left(self, episode: Episode) -> float:
        """Return how many more tokens the turns of an episode may have."""
        if episode.terms.max_episode_tokens is None:
            return math.inf
        return episode.terms.max_episode_tokens - episode.num_sampled - episode.num_reserved

    def raise_limit(self, episode: Episode, name: str, message: str) -> None:
        """Raise an error that names a limit. The first limit is also reported to the trainer."""
        if episode.limit is None:
            episode.limit = name
            self.tell(episode, {"limit": name})
        raise RequestError(f"{message} ({LIMIT}: {name})", kind=LIMIT, code=name)


class ClientGoneError(Exception):
    """The client has closed the connection."""


def episode_is_over() -> RequestError:
    return RequestError("this episode is over", 410, "episode_is_over")


async def disconnection(request: Request) -> None:
    """Wait until the client closes the connection. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request) -> dict:
    """Return the JSON object in a request."""
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise RequestError(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the request must be a JSON object, not {body!r:.60}")
    return body


def load_chat(settings: dict) -> ChatTokenizer:
    """Return the tokenizer of the model, with the chat template of the settings if there is one.

    Raises:
        InputError: there is no tokenizer, or its template cannot be parsed.
    """
    from transformers import AutoTokenizer

    path = settings["model_path"]
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"no tokenizer in model.path={path}: {error}") from error
    if settings["chat_template"] is not None:
        tokenizer.chat_template = settings["chat_template"]
    chat = ChatTokenizer.load(tokenizer, Path(path))
    return ChatTokenizer(tokenizer, chat.end_ids | set(settings["stop_token_ids"]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
