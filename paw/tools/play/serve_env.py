"""`paw serve env NAME`: serve a built-in environment, or a user's own, over OpenEnv's protocol.

docs/environments.md describes it.
"""

import argparse

from paw.envs import make_factory
from paw.errors import UserError
from paw.io.serving import listen, make_server, run_server
from paw.tools.evaluate.played import load_played


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Serve `options.env` until Ctrl-C or SIGTERM. Returns 0.

    Raises UserError if openenv is not installed.
    """
    listener, url = listen(options.host, options.port, f"paw serve env {options.env}")
    overrides = {"env.name": options.env, **overrides}
    config = load_played(options.recipe, overrides, {"env.data": "none"})
    factory = make_factory(config)
    try:
        from paw.tools.play.openenv_app import make_app
    except ImportError as error:
        raise UserError(
            f"paw serve env: {error}: pip install 'paw-trainer[openenv]', "
            "in a Python environment without vLLM, which needs another version of mcp"
        ) from None
    app = make_app(factory, config.env, options.sessions)
    server = make_server(app, timeout_s=config.env.step_timeout_s, websockets=True)
    line = f"{url}: {factory.fingerprint()}, up to {options.sessions} sessions"
    return run_server(server, listener, line)
