"""`python -m nvfp4lab` is `nvfp4lab`."""

import sys

from nvfp4lab.cli import main

sys.exit(main())
