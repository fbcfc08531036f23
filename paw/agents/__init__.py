"""Agents: how a model plays, each a coroutine `async def agent(env, model)` (docs/agents.md)."""
