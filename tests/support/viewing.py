"""The server of `paw view`, in a thread of this process."""

import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

from paw.tools.view import make_server


@contextmanager
def serving(root):
    """Serve `root`. Yields a function of (path, headers) that returns (status, text). Its attribute
    `url` is the address."""
    server = make_server(root)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def get(path, **headers):
        request = urllib.request.Request(f"{address}{path}", headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    get.url = address
    try:
        yield get
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
