import sys

from paw.cli import main

sys.exit(main())
