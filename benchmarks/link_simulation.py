"""Four ranks, links of a given speed: does a step take the time that docs/scaling.md's formulas say?

    python benchmarks/link_simulation.py              # starts itself under torchrun, writes results/scaling/

Real messages of real sizes travel between four gloo processes, hop by hop and in the order of the algorithms. What is
simulated is the speed: every hop waits latency + bytes / bandwidth before it is handed on, and computing is waiting too
(four ranks on a laptop's cores would disturb one another). The formulas never see the hops, only N, the number of
ranks, the speeds and the counted bytes:

    Primal           t·N/C + Σ over the layer's collectives of their ring's time
    ring attention   max(c·(N/C)², hop) · (C − 1) + c·(N/C)²,   hop = latency + 2·(N/C)·d·bytes / bandwidth
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from scaling import Link, all_gather_seconds, all_reduce_seconds, counted_bytes

RANKS, WIDTH, SIZE = 4, 64, 4  # embed_dim, bytes of a number
TOKEN, PAIR = 8e-6, 2e-9  # seconds that a token of Primal, a pair of tokens of softmax takes here
LINKS = [Link(1e6, 20e-3), Link(5e6, 20e-3), Link(5e6, 60e-3), Link(20e6, 60e-3)]
LENGTHS = (4096, 16384)
REPEATS = 3
OUT = Path(__file__).resolve().parents[1] / "results" / "scaling" / "link_simulation.json"


def hop(link: Link, block: torch.Tensor, tag: int) -> torch.Tensor:
    """Hand a block to the next rank over the slow link and take the previous one's."""
    rank = dist.get_rank()
    arrived = torch.empty_like(block)

    def send() -> None:
        time.sleep(link.latency + block.numel() * block.element_size() / link.bandwidth)
        dist.send(block, (rank + 1) % RANKS, tag=tag)

    thread = threading.Thread(target=send)
    thread.start()
    dist.recv(arrived, (rank - 1) % RANKS, tag=tag)
    thread.join()
    return arrived


def ring_all_reduce(link: Link, x: torch.Tensor) -> torch.Tensor:
    """Reduce-scatter, then all-gather, C − 1 hops of a C-th of x each."""
    rank, parts = dist.get_rank(), list(x.chunk(RANKS))
    for step in range(RANKS - 1):
        at = (rank - step) % RANKS
        parts[(at - 1) % RANKS] = parts[(at - 1) % RANKS] + hop(link, parts[at].contiguous(), step)
    for step in range(RANKS - 1):
        at = (rank + 1 - step) % RANKS
        parts[(at - 1) % RANKS] = hop(link, parts[at].contiguous(), RANKS + step)
    return torch.cat(parts)


def ring_all_gather(link: Link, x: torch.Tensor) -> torch.Tensor:
    parts, block = [x], x
    for step in range(RANKS - 1):
        block = hop(link, block, 2 * RANKS + step)
        parts.append(block)
    return torch.cat(parts)


def primal_step(link: Link, length: int, sent: dict[str, list[int]]) -> None:
    time.sleep(TOKEN * length / RANKS)
    for size in sent["all_reduce"]:
        numbers = -(-size // SIZE)
        ring_all_reduce(link, torch.ones(numbers + -numbers % RANKS))
    for size in sent["all_gather"]:
        ring_all_gather(link, torch.ones(max(size // SIZE, 1)))


def ring_attention_step(link: Link, length: int, sent: dict[str, list[int]]) -> None:
    """K and V go round while each rank computes with those that it has."""
    own, block = length // RANKS, torch.ones(2 * (length // RANKS) * WIDTH)
    for step in range(RANKS):
        computing = threading.Thread(target=time.sleep, args=(PAIR * own * own,))
        computing.start()
        if step < RANKS - 1:
            block = hop(link, block, 3 * RANKS + step)
        computing.join()


def primal_formula(link: Link, length: int, sent: dict[str, list[int]]) -> float:
    reduced = sum(all_reduce_seconds(size, RANKS, link) for size in sent["all_reduce"])
    gathered = sum(all_gather_seconds(size, RANKS, link) for size in sent["all_gather"])
    return TOKEN * length / RANKS + reduced + gathered


def ring_formula(link: Link, length: int, sent: dict[str, list[int]]) -> float:
    own = length / RANKS
    once = link.latency + 2 * own * WIDTH * SIZE / link.bandwidth
    return max(PAIR * own * own, once) * (RANKS - 1) + PAIR * own * own


def timed(step: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        begun = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def simulate(sent: dict[str, list[int]]) -> None:
    dist.init_process_group("gloo")
    rows = []
    kinds = {"primal": (primal_step, primal_formula), "ring attention": (ring_attention_step, ring_formula)}
    for link in LINKS:
        for length in LENGTHS:
            for name, (step, formula) in kinds.items():
                measured = timed(lambda: step(link, length, sent))  # noqa: B023
                predicted = formula(link, length, sent)
                rows.append({**link._asdict(), "tokens": length, "kind": name})
                rows[-1] |= {"measured": measured, "predicted": predicted}
                if dist.get_rank() == 0:
                    where = f"{link.bandwidth / 1e6:>4.0f} MB/s {1e3 * link.latency:>4.0f} ms"
                    print(
                        f"{name:>15} {length:>6} tokens {where}  measured {measured:.4f} s  predicted {predicted:.4f} s"
                    )
    if dist.get_rank() == 0:
        from primal_attention.utils.provenance import origin

        about = origin(torch.device("cpu"), "python benchmarks/link_simulation.py")
        settings = {
            "ranks": RANKS,
            "embed_dim": WIDTH,
            "seconds_per_token": TOKEN,
            "seconds_per_pair": PAIR,
            "sent": sent,
        }
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(
            json.dumps({**about, "settings": settings, "sent": sent, "rows": rows}, indent=1, ensure_ascii=False) + "\n"
        )
    dist.destroy_process_group()


def main() -> int:
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(sys.argv) > 1:  # a rank, told the bytes by the line below
        simulate(json.loads(sys.argv[1]))
        return 0
    sent = counted_bytes(RANKS, WIDTH, 4, rank=16, landmarks=64, dtype=torch.float32)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    return subprocess.run([sys.executable, *launch, __file__, json.dumps(sent)]).returncode


if __name__ == "__main__":
    sys.exit(main())
