"""OpenEnv's own client plays `paw serve env alfworld` at the given URL, asynchronously and
synchronously, and prints JSON."""

import asyncio
import json
import sys

from openenv.core import GenericEnvClient

URL = sys.argv[1]


async def play_two():
    """(what two episodes showed, turn by turn; the state of the first episode)."""
    async with (
        GenericEnvClient(base_url=URL) as first_client,
        GenericEnvClient(base_url=URL) as second_client,
    ):
        observations = []
        texts = []
        for index, client in enumerate((first_client, second_client)):
            started = await client.reset(split="train", index=index, seed=5)
            observations.append(started.observation)
            texts.append([started.observation["text"], started.observation["prompt"]])
        for turn in range(3):
            for index, client in enumerate((first_client, second_client)):
                action = observations[index]["admissible_actions"][turn]
                result = await client.step({"text": action})
                observation = observations[index] = result.observation
                texts[index] += [observation["text"], observation["prompt"]]
                texts[index] += [result.reward, result.done, observation["valid"]]
        return texts, await first_client.state()


with GenericEnvClient(base_url=URL).sync() as env:
    first = env.reset(seed=1).observation["text"]
    problems = []
    for call in (lambda: env.step({"word": "look"}), lambda: env.reset(split="nowhere")):
        try:
            call()
        except RuntimeError as error:
            problems.append(str(error))
    print(json.dumps({"two": asyncio.run(play_two()), "first": first, "problems": problems}))
