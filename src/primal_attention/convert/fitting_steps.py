"""What a step of a distillation does: error, gradients, clipping, AdamW; on a GPU all of it is one CUDA graph.

Teacher and student together start some thousand kernels a step, and a GPU waits for the host that starts them one by
one. So the steps of a batch shape that comes again are recorded (`engine.recording`) and replayed from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.convert.hf_recording import without_idle_masks
from primal_attention.nn.objective import primal_layers
from primal_attention.utils.cuda_graph import Recorder, Recording, rates_on_device

CLIP = 1.0
BETAS = (0.9, 0.98)  # the errors fall so fast at first that squares of a thousand steps ago say little


class Steps(Recorder):
    """The steps of one stage: they lower `error` by the weights in `groups`, which are keyed by their highest rates."""

    def __init__(
        self,
        chosen: nn.Module,
        groups: Mapping[float, list[nn.Parameter]],
        error: Callable[[Any], Tensor],
        rates: list[float],
        *,
        half: bool,
        graph: bool,
    ) -> None:
        """rates: of every step, as a part of the highest."""
        self.weights = [p for group in groups.values() for p in group]
        super().__init__(self.weights[0].device)
        self.records = self.records and graph
        self.layers = list(primal_layers(chosen).values())
        self.error, self.half, self.schedule = error, half, rates
        self.tops = list(groups)
        recordable = {"fused": True, "capturable": True} if self.on_gpu else {}
        each = [{"params": group, "lr": top} for top, group in groups.items()]
        self.optimizer = torch.optim.AdamW(each, betas=BETAS, weight_decay=0.0, **recordable)  # type: ignore[arg-type]
        # torch would warn that the first steps, before the recording, are not recorded.
        self.optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
        self.rates = [torch.zeros((), device=self.device) for _ in groups] if self.on_gpu else []
        self.errors = torch.zeros(len(rates), device=self.device)
        self.place = torch.zeros(1, dtype=torch.long, device=self.device)
        self.done = 0

    def run(self, batches: Iterable[Any]) -> None:
        """One step for each batch."""
        with self.own_stream():
            for batch in batches:
                for group, top in zip(self.optimizer.param_groups, self.tops, strict=True):
                    group["lr"] = top * self.schedule[self.done]
                for held, group in zip(self.rates, self.optimizer.param_groups, strict=False):
                    held.fill_(group["lr"])
                self.step(batch)
                self.done += 1

    def work(self, batch: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self._precision():
            error = self.error(batch)
        with torch.autocast(self.device.type, enabled=False):  # a caller's autocast is for the forward pass
            error.backward()
            torch.nn.utils.clip_grad_norm_(self.weights, CLIP)
            with rates_on_device(self.optimizer, self.rates):
                self.optimizer.step()
            self.errors.index_copy_(0, self.place, error.detach().float().view(1))
            self.place.add_(1)
        for layer in self.layers:
            layer._objective = None  # it holds the step's graph, which holds on to the stream that it was made on

    def _record(self, batch: Any) -> Recording:
        with without_idle_masks():
            return super()._record(batch)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for layer in self.layers:
            layer._objective = None

    def _precision(self) -> AbstractContextManager[Any]:
        """Half precision where asked for or where the caller has it.

        No cast weight is kept: it would be that of an earlier step, and inside a recording only a replay fills it.
        """
        kind = self.device.type
        around = torch.is_autocast_enabled(kind)
        dtype = torch.bfloat16 if self.half else torch.get_autocast_dtype(kind)
        return torch.autocast(kind, dtype=dtype, enabled=self.half or around, cache_enabled=False)

    def losses(self, start: int) -> list[float]:
        """The errors of the steps from `start` on; waits for the device."""
        found: list[float] = self.errors[start : self.done].tolist()
        return found
