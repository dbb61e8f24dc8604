"""Streaming states as data: save, load, fork and batch them.

A state is a nested tuple of tensors with the sequences in dimension 0, and of settings (numbers, texts, None). The
functions work for every layer and model that has `initial_state`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, cat
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ..utils.errors import FileError
from ..utils.files import write_atomically

StateT = TypeVar("StateT")


def save_state(path: str | PathLike[str], state: Any) -> None:
    """Write a state to a safetensors file, which is replaced if it exists.

    Args:
        path: The file.
        state: A state that a layer or model returned.
    """
    from safetensors.torch import save

    leaves = {str(i): leaf for i, leaf in enumerate(pytree.tree_leaves(state))}
    tensors = {name: leaf.detach().cpu().clone() for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    settings = json.dumps({name: leaf for name, leaf in leaves.items() if name not in tensors})
    content = save({name: leaf.contiguous() for name, leaf in tensors.items()}, metadata={"state": settings})
    write_atomically(Path(path), lambda file: file.write(content))


def load_state(path: str | PathLike[str], model: Any) -> Any:
    """Read a state that `save_state` wrote.

    Args:
        path: The file.
        model: A layer or model whose `initial_state` has the structure of the state. It also gives the device.

    Returns:
        The state.

    Raises:
        FileError: If the file is damaged, or is the state of another kind of layer or model. It is a ValueError.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            stored = json.loads((file.metadata() or {})["state"])
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise FileError(f"{path} is not a file that save_state wrote ({error!r})") from error
    expected, structure = pytree.tree_flatten(model.initial_state(1))
    leaves = [stored.get(str(i)) for i in range(len(expected))]
    if len(stored) != len(expected) or not all(map(_fits, leaves, expected)):
        raise FileError(f"{path} is the state of another kind of layer or model")
    if len({len(leaf) for leaf in leaves if isinstance(leaf, Tensor)}) > 1:
        raise FileError(f"{path} has tensors with different numbers of sequences")
    device = next(like.device for like in expected if isinstance(like, Tensor))
    moved = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(moved, structure)


def fork_state(state: StateT, count: int) -> StateT:
    """Repeat each sequence in neighbouring rows: one prefix, many continuations.

    Args:
        state: A state of one or more sequences.
        count: Copies of each sequence.
    """
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.repeat_interleave(count, dim=0), state)  # type: ignore[no-any-return]


def batch_states(states: Sequence[StateT]) -> StateT:
    """Join the sequences of several states into one batch.

    Args:
        states: States of the same layer or model. They may have read different numbers of tokens.
    """
    if len({str(pytree.tree_structure(state)) for state in states}) != 1:
        raise ValueError(f"states must be one or more states of the same layer or model (got {len(states)} states)")
    return pytree.tree_map(_join, *states)  # type: ignore[no-any-return]


def split_state(state: StateT) -> list[StateT]:
    """Split a batch into one state for each sequence.

    Args:
        state: A state of one or more sequences.
    """
    count = next(len(leaf) for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor))
    return [pytree.tree_map_only(Tensor, itemgetter(slice(i, i + 1)), state) for i in range(count)]


def _fits(leaf: Any, like: Any) -> bool:
    if not isinstance(like, Tensor):
        return type(leaf) is type(like) and (isinstance(like, int) or leaf == like)
    if not isinstance(leaf, Tensor) or leaf.ndim != like.ndim:
        return False
    widths = zip(leaf.shape[1:], like.shape[1:], strict=True)  # an empty key-value cache has no width yet
    return leaf.is_floating_point() == like.is_floating_point() and all(a == b or b == 0 for a, b in widths)


def _join(*leaves: Any) -> Any:
    first = leaves[0]
    if isinstance(first, Tensor):
        # Only key-value caches differ in width. Padding with zeros marks the new slots as without a token.
        widths = [max(sizes) for sizes in zip(*(leaf.shape[1:] for leaf in leaves), strict=True)]
        return cat([_pad(leaf, widths) for leaf in leaves])
    if isinstance(first, int):  # an upper bound of the tokens read
        return max(leaves)
    if any(leaf != first for leaf in leaves):
        raise ValueError(f"states must belong to the same kind of layer (got {first!r} and others)")
    return first


def _pad(leaf: Tensor, widths: list[int]) -> Tensor:
    gaps = [width - size for width, size in zip(widths, leaf.shape[1:], strict=True)]
    return F.pad(leaf, [side for gap in reversed(gaps) for side in (0, gap)])
