import os

try:
    from paw.cli import entry
except KeyboardInterrupt:
    os._exit(130)

entry()
