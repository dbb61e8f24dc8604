"""How much a rank hands to collectives: a dispatch mode that looks at every functional collective on its way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Bytes that this rank gives to each kind of collective while the mode is on, the backward pass included.

        with Traffic() as traffic:
            layer(x).sum().backward()
        traffic.total, traffic.bytes["all_reduce"], traffic.calls["all_reduce"]

    What then travels depends on the algorithm: of S bytes an all-reduce over C ranks in a ring sends 2·S·(C − 1)/C
    from each, an all-gather S·(C − 1), a reduce-scatter S·(C − 1)/C.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "_c10d_functional" and name != "wait_tensor" and isinstance(args[0], Tensor):
            kind = name.removesuffix("_into_tensor").removesuffix("_tensor")
            self.bytes[kind] += args[0].numel() * args[0].element_size()
            self.calls[kind] += 1
        run: Callable[..., Any] = func
        return run(*args, **(kwargs or {}))
