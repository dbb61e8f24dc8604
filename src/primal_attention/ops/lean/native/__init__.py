"""The lean path in C: a whole pass over the layer in one call, where a compiler is at hand.

Between the large products PyTorch needs a few dozen calls, each with a start of its own, threads that meet at its end
and results that go through memory. The C sources beside this file take a block of tokens through all steps while it
stays in the cache, products included, and form every sum in a fixed order. They are compiled on first use, for this
processor, into the user's cache folder (`build`). Where that fails, and for what they do not know, the passes in
PyTorch do the same; PRIMAL_NATIVE=0 asks for them.
"""

from .attention import fitting, native_attention
from .library import missing

__all__ = ["fitting", "missing", "native_attention"]
