"""openenv's own client plays `paw serve env alfworld` at the URL given, asynchronously and not;
prints JSON."""

import asyncio
import json
import sys

from openenv.core import GenericEnvClient

URL = sys.argv[1]


async def play_two():
    async with GenericEnvClient(base_url=URL) as one, GenericEnvClient(base_url=URL) as two:
        seen = [
            (await env.reset(split="train", index=i, seed=5)).observation
            for i, env in enumerate((one, two))
        ]
        texts = [[look["text"], look["prompt"]] for look in seen]
        for turn in range(3):
            for i, env in enumerate((one, two)):
                result = await env.step({"text": seen[i]["admissible_actions"][turn]})
                seen[i] = result.observation
                texts[i] += [
                    seen[i]["text"],
                    seen[i]["prompt"],
                    result.reward,
                    result.done,
                    seen[i]["valid"],
                ]
        return texts, await one.state()


with GenericEnvClient(base_url=URL).sync() as env:
    first = env.reset(seed=1).observation["text"]
    problems = []
    for call in (lambda: env.step({"word": "look"}), lambda: env.reset(split="nowhere")):
        try:
            call()
        except RuntimeError as error:
            problems.append(str(error))
    print(json.dumps({"two": asyncio.run(play_two()), "first": first, "problems": problems}))
