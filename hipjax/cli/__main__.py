"""``python -m hipjax.cli``."""

import sys

from hipjax.cli import main

sys.exit(main())
