"""Agents: how a model plays, each a coroutine `async def agent(env, model)` (paw/rollout/episode.py).

| agent.type | what the model sees |
|---|---|
| plain | the environment's own context, one message a turn (`paw.rollout.episode`) |
| react | a transcript of thoughts, actions and observations after examples (`react`, arXiv 2210.03629) |
| reflexion | the same again after a failure, with the plans made from it (`reflexion`, arXiv 2303.11366) |
| search-r1 | one answer that searches as it is written (`search_r1`, arXiv 2503.09516) |
| zerosearch | that, with a second LLM as the search engine (`zerosearch`, arXiv 2505.04588) |
"""
