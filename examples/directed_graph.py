"""Kernel SVD of a directed graph: roles of its nodes, and biclusters of senders and receivers.

    pip install -e '.[ksvd,report]'
    python examples/directed_graph.py

The adjacency matrix of a directed graph is an asymmetric kernel between nodes as senders (rows) and nodes as receivers
(columns). Its left singular vectors describe the receivers of a node, its right singular vectors the senders to it. In
this graph the two groupings differ, and a symmetrised matrix separates neither. The script writes directed_graph.png.
PRIMAL_SMALL=1 uses a smaller graph.
"""

# %%
from __future__ import annotations

import os

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, consensus_score

from primal_attention import KernelSVD

SMALL = bool(os.environ.get("PRIMAL_SMALL"))
GROUPS, NODES = 3, 180 if SMALL else 600

# %% [markdown]
# ## A graph with two roles per node
# Each node has a sending group and, independently of it, a receiving group. An edge i → j is likely if the sending
# group of i equals the receiving group of j. Replace `graph` by any `networkx.DiGraph`.

# %%
roles = [(send, receive) for send in range(GROUPS) for receive in range(GROUPS)]
chances = [[0.15 if send == receive else 0.03 for _, receive in roles] for send, _ in roles]
sizes = [NODES // len(roles)] * len(roles)
graph = nx.stochastic_block_model(sizes, chances, directed=True, seed=0)
sends, receives = np.repeat(roles, sizes, axis=0).T
edges = nx.to_numpy_array(graph)
print(f"{graph.number_of_nodes()} nodes, {graph.number_of_edges()} edges")

# %% [markdown]
# ## The decomposition
# `kernel="precomputed"` takes the matrix itself. Dividing by the square roots of the degrees keeps nodes with many
# edges from dominating. `objective_` is J of the paper, which is zero at an exact solution.

# %%
out_degree = edges.sum(axis=1, keepdims=True).clip(min=1)
in_degree = edges.sum(axis=0, keepdims=True).clip(min=1)
kernel = edges / np.sqrt(out_degree * in_degree)
svd = KernelSVD(n_components=6, kernel="precomputed").fit(kernel)
print("singular values:", svd.singular_values_.round(2))
print(f"J = {svd.objective_:.1e}")

# %% [markdown]
# ## Roles from the scores
# The first direction is the degree; the next ones separate the groups. `transform` gives the e-scores of senders,
# `transform_keys` the r-scores of receivers.

# %%
e_scores = svd.transform(kernel)[:, 1:GROUPS]
r_scores = svd.transform_keys(kernel.T)[:, 1:GROUPS]


def agreement(scores: np.ndarray, groups: np.ndarray) -> float:
    """Adjusted Rand index of k-means clusters and the groups: 1 is equal, 0 is chance."""
    clusters = KMeans(GROUPS, n_init=10, random_state=0).fit_predict(scores)
    return float(adjusted_rand_score(groups, clusters))


_, vectors = np.linalg.eigh(kernel + kernel.T)
symmetric = vectors[:, -GROUPS:-1]
print("                         sending  receiving")
for name, scores in (("e-scores", e_scores), ("r-scores", r_scores), ("symmetrised eigenvectors", symmetric)):
    print(f"{name:24s} {agreement(scores, sends):7.2f} {agreement(scores, receives):10.2f}")

# %% [markdown]
# ## Biclusters
# A bicluster is a set of senders and a set of receivers with many edges between them. Both kinds of scores lie in one
# space, so one k-means over senders and receivers pairs the groups.

# %%
labels = KMeans(GROUPS, n_init=10, random_state=0).fit_predict(np.vstack([e_scores, r_scores]))
rows, columns = (np.equal.outer(np.arange(GROUPS), part) for part in np.split(labels, 2))
truth = tuple(np.equal.outer(np.arange(GROUPS), part) for part in (sends, receives))
print(f"biclusters: consensus with the groups {consensus_score((rows, columns), truth):.2f} (1 is equal)")
print("density of edges between sender and receiver clusters:")
print((rows @ edges @ columns.T / np.outer(rows.sum(axis=1), columns.sum(axis=1))).round(3))

# %% [markdown]
# ## A new node
# A node that joins later needs its edges only: `transform` takes its row of the kernel.

# %%
rng = np.random.default_rng(0)
new_row = (rng.random((1, len(edges))) < np.where(receives == 0, 0.15, 0.03)) / np.sqrt(in_degree)
new_row /= np.sqrt(max((new_row > 0).sum(), 1))
new_score = svd.transform(new_row)[:, 1:GROUPS]
centres = np.stack([e_scores[sends == group].mean(axis=0) for group in range(GROUPS)])
print("nearest sending group of the new node:", np.linalg.norm(centres - new_score, axis=1).argmin())

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3.5), dpi=60)
for axis, scores, groups, name in zip(axes, (e_scores, r_scores), (sends, receives), ("e", "r"), strict=True):
    axis.scatter(scores[:, 0], scores[:, 1], c=groups, s=8)
    axis.set(title=f"{name}-scores", xlabel="direction 2", ylabel="direction 3")
figure.tight_layout()
figure.savefig("directed_graph.png")
