"""``python -m hipjax``."""

import sys

from hipjax.cli import main

sys.exit(main())
