"""Benchmarks of whole models: training steps, training steps on Long-Range Arena, and generation."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from primal_attention.bench import measurement
from primal_attention.bench.attention import Shape, make_grid
from primal_attention.bench.measurement import GRAPH, SKIPPED, Implementation, Row
from primal_attention.data.lra.tokens import TokenData, TokenSplit
from primal_attention.models.lm import LanguageConfig, LanguageModel, LanguageState
from primal_attention.nn.baselines.softmax import CachedSoftmaxAttention, CacheState, rotary_angles, rotate
from primal_attention.nn.blocks import BlockState
from primal_attention.nn.objective import ksvd_loss
from primal_attention.nn.primal import PrimalAttention
from primal_attention.official.attention import use_authors_layers
from primal_attention.ops.padding import Tokens
from primal_attention.train import lra
from primal_attention.train.config import override
from primal_attention.train.distributed import make_fabric
from primal_attention.train.step import TrainingStep, make_optimizer
from primal_attention.utils.errors import check_name
from primal_attention.utils.files import write_json
from primal_attention.utils.provenance import collect, device_name

# `primal bench model`: training steps of softmax attention (SDPA) and Primal in the same process. The models are pre-LN
# encoders with FFNs of width 4d, GELU, AdamW and no dropout. A step is forward, backward and update, launched by the
# host. The loss of Primal models includes the KSVD loss.

ETA = 0.1
LENGTHS = (128, 197, 256, 333, 512, 640, 777, 1024, 1500, 2048)  # of the dynamic row


@dataclass(frozen=True)
class Spec:
    """A row of the table: a model, its input and how it runs."""

    model: str
    embed_dim: int
    num_heads: int
    length: int
    mode: str = "compile"  # or "reduce-overhead", "eager"
    dtype: str = "autocast"  # or "bf16"
    tokens: int = 32768  # per step
    layers: int = 12
    max_batch: int | None = None
    layout: str = "dense"  # or "padded", "packed", "dynamic" (several lengths)
    last_layer_only: bool = False  # the other layers of the Primal model are softmax attention
    primal: dict[str, Any] = field(default_factory=dict)  # keywords of PrimalAttention

    @property
    def batch(self) -> int:
        if self.layout in ("padded", "packed"):  # the mean length is 5/8 of the longest
            return max(1, 8 * self.tokens // (5 * self.length))
        return min(max(1, self.tokens // self.length), self.max_batch or self.tokens)

    @property
    def facts(self) -> dict[str, Any]:
        return {"model": str(self), "mode": self.mode, "dtype": self.dtype}

    def __str__(self) -> str:
        return f"{self.model}-{self.mode}-{self.dtype}"


DEIT: dict[str, Any] = {"last_layer_only": True, "primal": {"rank": 96, "landmarks": 197}}
DECISION: dict[str, Any] = {
    "layers": 3, "max_batch": 64, "last_layer_only": True,
    "primal": {"rank": 96, "causal": True, "data_dependent": False},
}  # fmt: skip
SPECS = (
    Spec("512x1024", 512, 8, 1024),
    Spec("512x1024", 512, 8, 1024, "compile", "bf16"),
    Spec("512x1024", 512, 8, 1024, "eager", "bf16"),
    Spec("512x1024", 512, 8, 1024, "eager"),
    Spec("512x1024", 512, 8, 1024, "reduce-overhead"),
    Spec("512x4096", 512, 8, 4096),
    Spec("768x8192", 768, 12, 8192),
    *(Spec("vit", 384, 6, 197, mode) for mode in ("compile", "eager")),
    *(Spec("deit", 384, 6, 197, mode, **DEIT) for mode in ("compile", "eager")),
    *(Spec("decision", 256, 4, 60, mode, **DECISION) for mode in ("compile", "eager")),
    *(Spec(layout, 512, 8, 1024, "eager", layout=layout) for layout in ("padded", "packed")),
    Spec("dynamic", 512, 8, LENGTHS[-1], layout="dynamic"),
)


def choose_specs(args: Namespace) -> list[Spec]:
    """Return all rows, or those that `args.rows` names by row or model; few tokens also shorten the sequences."""
    known = dict.fromkeys(name for spec in SPECS for name in (spec.model, str(spec)))
    for row in args.rows:
        check_name(row, known, "row")
    chosen = [spec for spec in SPECS if not args.rows or {str(spec), spec.model} & set(args.rows)]
    tokens = args.tokens
    return [replace(s, tokens=tokens, layers=args.layers or s.layers, length=min(s.length, tokens)) for s in chosen]


class SoftmaxAttention(nn.Module):
    """The least that softmax attention needs: one input map, SDPA, one output map."""

    def __init__(self, embed_dim: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.in_proj, self.out_proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, p)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=self.causal)
        return self.out_proj(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, spec: Spec, kind: str) -> None:
        super().__init__()
        d, h = spec.embed_dim, spec.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        if kind == "sdpa":
            self.attention: nn.Module = SoftmaxAttention(d, h, spec.primal.get("causal", False))
        else:
            self.attention = PrimalAttention(d, h, **{"rank": 30, "landmarks": 300, **spec.primal})

    def forward(self, x: Tensor, keywords: dict[str, Any]) -> Tensor:
        x = x + self.attention(self.norm1(x), **keywords)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


def make_input(spec: Spec, kind: str, device: torch.device, seed: int) -> tuple[Tensor, dict[str, Any], Tensor | None]:
    """Return x, the keywords of the attention layers, and the weight of each token in the loss (None: equal)."""
    n, width = spec.length, spec.embed_dim
    if spec.layout in ("dense", "dynamic"):
        return torch.randn(spec.batch, n, width, device=device), {}, None
    # Lengths are uniform in [n/4, n] with the mean 5n/8, and the same for both kinds.
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(max(1, n // 4), n + 1, (spec.batch,), generator=generator)
    longest = int(lengths.max())
    if spec.layout == "packed" and kind == "primal":
        boundaries = F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
        x = torch.randn(int(lengths.sum()), width, device=device)
        return x, {"cu_seqlens": boundaries, "max_seqlen": longest}, None
    valid = (torch.arange(longest) < lengths[:, None]).to(device)
    x = torch.randn(len(lengths), longest, width, device=device)
    keywords = {"attn_mask": valid[:, None, None]} if kind == "sdpa" else {"key_padding_mask": ~valid}
    return x, keywords, valid / valid.sum()


def make_step(kind: str, args: Namespace, spec: Spec) -> Callable[..., None]:
    """Return a training step of a new model; it takes the length of its sequences, by default that of the row."""
    device: torch.device = args.device
    dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float32
    kinds = [kind if not spec.last_layer_only or i == spec.layers - 1 else "sdpa" for i in range(spec.layers)]
    model = nn.ModuleList(Block(spec, kind) for kind in kinds).to(device, dtype)
    tokens, keywords, weight = make_input(spec, kind, device, args.seed)
    x = tokens.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def compute_loss(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=spec.dtype == "autocast"):
            for block in model:
                x = block(x, keywords)
            error = x.float().square()
            loss = error.mean() if weight is None else (error.mean(-1) * weight).sum()
            return loss if kind == "sdpa" else loss + ETA * ksvd_loss(model)

    compiled = compute_loss
    if spec.mode != "eager":
        mode, dynamic = spec.mode.replace("compile", "default"), True if spec.layout == "dynamic" else None
        compiled = torch.compile(compute_loss, mode=mode, dynamic=dynamic, backend=args.compiler)

    def step(length: int | None = None) -> None:
        if spec.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        compiled(x if length is None else x[:, :length].contiguous()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def measure_training(implementation: Implementation, spec: Spec, args: Namespace) -> Row:
    """Measure the first step, which compiles, then time and peak memory of a step, parameters included.

    The dynamic row has the number of graphs that are compiled after the first step, over ten lengths.
    """
    torch.compiler.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    # At its default limit of recompilations Dynamo stops compiling and counting.
    with torch._dynamo.config.patch(cache_size_limit=64):
        step = implementation.build(spec)
        start = time.perf_counter()
        step()
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        row: Row = {"first_seconds": time.perf_counter() - start}
        if spec.layout != "dynamic":
            return row | measurement.measure_step(step, args, eager=True)
        first = graphs["unique_graphs"]
        for length in LENGTHS[:-1]:
            step(max(2, length * spec.length // LENGTHS[-1]))
        return row | {"recompilations": graphs["unique_graphs"] - first}


def run_model(args: Namespace) -> dict[str, Any]:
    """Measure all rows and return the report, which is also written to `args.file`; args: the flags of the command."""
    models = [Implementation(kind, kind, partial(make_step, kind, args)) for kind in ("sdpa", "primal")]
    return measurement.measure_all(args, models, measure_training, [[spec] for spec in choose_specs(args)])


# `primal bench lra`: time and memory of a training step on Long-Range Arena, for every attention of the paper's table.
# The models and batch sizes are the paper's, the tokens random, with as much padding as the task has.

PUBLISHED = "published"  # Primal-Attention as the authors' code computes it, which is never compiled
ATTENTIONS = ("softmax", "nystrom", "linformer", "performer", "reformer", "primal+", "primal", PUBLISHED)


class Task(NamedTuple):
    """Shape of a task's data. `filled` is the mean share of a sequence that is not padding."""

    length: int
    vocabulary: int
    classes: int
    filled: float = 1.0
    pairs: bool = False

    def random_data(self, samples: int) -> TokenData:
        rng = np.random.default_rng(0)

        def tokens() -> np.ndarray:
            ids = rng.integers(1, self.vocabulary, (samples, self.length)).astype(np.uint8)
            if self.filled < 1:
                lengths = rng.uniform(0.5 * self.filled, min(1.0, 1.5 * self.filled), (samples, 1)) * self.length
                ids[np.arange(self.length) >= lengths] = 0
            return ids

        split = TokenSplit(tokens(), rng.integers(0, self.classes, samples), tokens() if self.pairs else None)
        return TokenData("random", split, split, split, self.vocabulary, self.classes, padded=self.filled < 1)


TASKS = {
    "listops": Task(2000, 16, 10, filled=0.5),
    "text": Task(4000, 256, 2, filled=0.33),
    "retrieval": Task(4000, 256, 2, filled=0.9, pairs=True),
    "image": Task(1024, 256, 10),
    "pathfinder": Task(1024, 256, 2),
}


def make_lra_step(attention: str, device: torch.device, spec: Spec) -> Callable[[], None]:
    """Return the training step of the paper's model on one random batch; compiled on a GPU, as in the trainings."""
    is_published, is_gpu = attention == PUBLISHED, device.type == "cuda"
    changes = {
        "model.attention": ("primal" if is_published else attention,),
        "trainer.batch_size": spec.batch,
        "trainer.accelerator": "gpu" if is_gpu else "cpu",
        "trainer.compile": "on" if is_gpu and not is_published else "off",
    }
    recipe = override(lra.paper_recipe(spec.model), changes).resolved()
    experiment = lra.build_from(recipe, TASKS[spec.model].random_data(spec.batch))
    module = experiment.module
    if is_published:
        use_authors_layers(module.model)
    module.to(device).train()
    optimizer, fabric = make_optimizer(module.model, recipe.optim, recordable=is_gpu), make_fabric(recipe.trainer)
    step = TrainingStep(fabric, module, module, optimizer, lambda step: recipe.optim.lr, records=False)
    return partial(step.work, next(iter(experiment.train.to(device))))


def measure_lra(implementation: Implementation, spec: Spec, args: Namespace) -> Row:
    """Measure a step, replayed and eager, and store it as a summary, TASK/ATTENTION.json, unless there is one.

    Its times are seconds per 1000 steps, its memory is the peak of allocated bytes above the start.
    """
    name, is_gpu = implementation.name, args.device.type == "cuda"
    file = args.out / spec.model / f"{name}.json"
    if file.exists():
        return {"status": SKIPPED, "note": f"{file} exists"}
    start_bytes = torch.cuda.memory_allocated(args.device) if is_gpu else 0
    step = implementation.build(spec)
    row = measurement.measure_step(step, args, eager=False)
    row["eager_seconds"] = row["seconds"]
    if is_gpu:
        row["peak_bytes"] -= start_bytes
        measurement.free_memory(args.device)  # the pool of the graph
        with torch.compiler.set_stance("force_eager"):
            row["eager_seconds"] = measurement.time_step(step, args, eager=True)["seconds"]
    graph = 1000 * row["seconds"] if row["method"] == GRAPH else None
    facts = {"set": spec.model, "max_length": spec.length, "batch_size": spec.batch, "note": row["note"]}
    facts |= {"compiled": is_gpu and name != PUBLISHED, "repeats": args.repeats}
    origin = collect(command=args.command, device=args.device, commit=args.commit)
    summary = {"format": 1, "benchmark": "lra", "recipe": f"lra-efficiency/{spec.model}", "label": name, "seed": 0}
    summary |= {"scores": {"step": {"graph": graph, "eager": 1000 * row["eager_seconds"]}}, "config": {}}
    summary |= {"peak_memory_bytes": row["peak_bytes"], "data": facts}
    summary |= {"device": device_name(origin["hardware"]), "torch": torch.__version__, **origin}
    write_json(file, summary)
    return row


def run_lra(args: Namespace) -> dict[str, Any]:
    """Measure what has no file TASK/ATTENTION.json yet and return the report; args: the flags of the command."""
    for noun, names, known in (("task", args.tasks, TASKS), ("model", args.models, ATTENTIONS)):
        for name in names:
            check_name(name, known, noun)
    models = args.models or ATTENTIONS
    steps = [Implementation(name, name, partial(make_lra_step, name, args.device)) for name in models]
    specs, mode = [], "compile" if args.device.type == "cuda" else "eager"
    for task in args.tasks or TASKS:
        length, batch = TASKS[task].length, args.batch_size or lra.TASKS[task].batch_size
        specs.append(Spec(task, lra.LRAModel.embed_dim, lra.LRAModel.num_heads, length, mode, tokens=batch * length))
    return measurement.measure_all(args, steps, measure_lra, [[spec] for spec in specs])


# `primal bench generate`: tokens per second of a language model after N tokens, and the size of its state. Softmax
# attention has a cache of keys and values, which grows with N.

CHUNK = 16384  # tokens of all sequences that are read at once before the step that is timed
VOCABULARY = 8192
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "sdpa": {"attention": ("softmax",)},
    "primal-mean": {"primal_mode": "mean"},
    "primal-decay": {"primal_mode": "decay", "conv": 4, "gate": True},
    "primal-delta": {"primal_mode": "delta", "conv": 4, "gate": True},
}


class PreallocatedCache(CachedSoftmaxAttention):
    """Softmax attention that writes into the last place of its cache instead of copying it."""

    isolates_non_finite = False  # time the mechanism alone

    def _resume(
        self, x: Tensor, tokens: Tokens, state: CacheState | None, nans: Tensor | None
    ) -> tuple[Tensor, CacheState]:
        assert state is not None
        q, k, v = self.project_in(x)  # (B, H, 1, p)
        angles = rotary_angles(state.position[:, None], self.head_dim)
        q, k = rotate(q, *angles), rotate(k, *angles)
        state.k[:, :, -1:], state.v[:, :, -1:] = k, v
        return F.scaled_dot_product_attention(q, state.k, state.v), state


def build_model(layers: int, keywords: dict[str, Any], shape: Shape) -> LanguageModel:
    d, h = shape.embed_dim, shape.num_heads
    sizes = {"embed_dim": d, "num_heads": h, "ffn_dim": 4 * d, "layers": layers, "rank": shape.rank}
    model = LanguageModel(LanguageConfig(VOCABULARY, **{**sizes, **keywords}))
    if model.config.attention == ("softmax",):
        for block in model.blocks:
            block.attention = PreallocatedCache(d, h)
    return model.to(shape.device, shape.dtype)


def random_caches(model: LanguageModel, shape: Shape) -> LanguageState:
    """Return a state of random keys and values of N tokens, with a place for the next one.

    Reading the tokens would be quadratic, and the values do not change the time.
    """
    size = (2, shape.batch, shape.num_heads, shape.length + 1, shape.embed_dim // shape.num_heads)
    position = torch.full((shape.batch,), shape.length, device=shape.device)
    pairs = [torch.randn(size, **shape.factory) for _ in model.blocks]
    caches = [CacheState(pair[0], pair[1], position[:0], position) for pair in pairs]
    return LanguageState(tuple(BlockState(cache, None) for cache in caches), position)


@torch.no_grad()
def measure_token(implementation: Implementation, shape: Shape, args: Namespace) -> Row:
    """Measure the state after N random tokens, then memory and time of the next one."""
    model = implementation.build(shape).eval()

    def draw(n: int) -> Tensor:
        return torch.randint(VOCABULARY, (shape.batch, n), device=shape.device)

    state: Any
    if model.config.attention == ("softmax",):
        state = random_caches(model, shape)
    else:
        state, chunk = model.initial_state(shape.batch), max(1, CHUNK // shape.batch)
        for start in range(0, shape.length, chunk):
            _, state = model.hidden(draw(min(chunk, shape.length - start)), state=state, return_state=True)
    token = draw(1)[:, 0]
    _, next_state = model.step(token, state)
    # Each storage counts once and as a whole: a view keeps all of it alive.
    storages = [t.untyped_storage() for t in tree_leaves(next_state) if isinstance(t, Tensor)]
    state_bytes = sum({s.data_ptr(): s.nbytes() for s in storages}.values()) // shape.batch
    row = measurement.measure_step(partial(model.step, token, state), args, args.eager)
    return {"state_bytes": state_bytes, "tokens_per_second": shape.batch / row["seconds"], **row}


def run_generate(args: Namespace) -> dict[str, Any]:
    """Measure and return the report, which is also written to `args.file`; args: the flags of the command."""
    models = [
        Implementation(name, name.partition("-")[0], partial(build_model, args.layers, keywords))
        for name, keywords in LANGUAGE_MODELS.items()
    ]
    chosen = measurement.choose(models, args.only, baselines=False)
    grid = [[replace(s, batch=batch) for s in shapes] for shapes in make_grid(args) for batch in args.batches]
    return measurement.measure_all(args, chosen, measure_token, grid)
