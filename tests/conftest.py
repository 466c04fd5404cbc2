"""Settings of every test run.

Nothing of hipjax is imported here: the jaxtyping plugin can only instrument a package that
has not been imported yet.
"""

import os

import hypothesis
import jax

# The plugins may have imported jax already, so the environment alone would come too late.
# Ask for an accelerator with JAX_PLATFORMS=cuda pytest …
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")

# Compiling takes longer than any deadline. In CI the examples are the same at every run.
hypothesis.settings.register_profile(
    "hipjax", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True
)
hypothesis.settings.load_profile("hipjax")
