"""Array aliases and the one legend of axis letters.

Every shape in this package is written with these letters.

======  =====================================================================
``B``   sequences of a batch
``T``   tokens of a prompt chunk
``R``   rows: tokens decoded at once, 1 for a plain step, drafts + 1 for a window
``S``   cache rows: the capacity of a sequence
``H``   hidden size
``C``   residual streams (``hc_count``)
``D``   ``C * H``, the streams side by side, stream-major
``V``   vocabulary
``E``   experts, of which ``K`` are chosen, each ``I`` wide
``N``   heads (query heads in attention, value heads in the DeltaNet)
======  =====================================================================

Lengths, positions and counts are int32. Token ids are int32. Activations are float32.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray

Params = Mapping[str, Any]
"""A plain nested dict of arrays that mirrors the checkpoint's names."""

Leaf = Any
"""An array field of a pytree class. Left unchecked, since transformations put axis
numbers, shapes and other stand-ins there; the class docstring states the shape."""

__all__ = ["Array", "Bool", "Float", "Int", "Leaf", "Num", "PRNGKeyArray", "Params"]
