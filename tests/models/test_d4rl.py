"""Decision Transformer: equal to transformers' own and to the authors' causal attention, padded or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from closeness import assert_close
from primal_attention.models.d4rl import DecisionTransformer
from primal_attention.nn.baselines import attention_names, attention_traits
from primal_attention.official import load_official

STATE, ACTION, K = 5, 3, 6
CAUSAL = [name for name in attention_names() if attention_traits(name).supports_causal]
TIGHT = 1e-11  # float64 through two small layers


def small(attention: str | list[str] = "primal+", **kwargs) -> DecisionTransformer:
    torch.manual_seed(0)
    settings = {"primal": {"rank": 4}, "performer": {"features": 16, "seed": 1}, "reformer": {"seed": 1}}
    model = DecisionTransformer(
        STATE, ACTION, attention=attention, embed_dim=16, num_heads=2, layers=2, context=K, max_episode=40,
        attention_kwargs=settings, **kwargs,
    )  # fmt: skip
    model = model.double().eval()
    model.set_state_moments(torch.randn(STATE), torch.rand(STATE) + 0.5)
    # GPT-2's small start makes everything nearly linear; larger weights let a mistake show.
    for block in model.blocks:
        for name, weight in block.named_parameters():
            if name.endswith("weight") and weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.3)
    return model


def episode(steps: int, batch: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    stamps = torch.arange(steps).expand(batch, steps) + torch.arange(batch)[:, None]
    return draw(batch, steps, STATE), draw(batch, steps, ACTION).tanh(), 2000 + 500 * draw(batch, steps), stamps


def pad(columns: tuple[Tensor, ...], lengths: list[int], left: bool) -> tuple[list[Tensor], Tensor]:
    """Windows of K steps whose padding holds values that must not matter."""
    windows, masks = [], []
    for column in columns:
        window = torch.full_like(column[:, :K], 7)
        for row, n in enumerate(lengths):
            window[row, K - n if left else 0 : K if left else n] = column[row, :n]
        windows.append(window)
    for n in lengths:
        place = torch.arange(K)
        masks.append(place < K - n if left else place >= n)
    return windows, torch.stack(masks)


def test_it_is_the_decision_transformer_of_transformers():
    heads = 2
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DecisionTransformerConfig(
        state_dim=STATE, act_dim=ACTION, hidden_size=16, n_layer=3, n_head=heads, max_ep_len=40,
        activation_function="relu", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.DecisionTransformerModel(config).double().eval()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    ours = load_official(theirs.state_dict(), "rl", num_heads=heads).eval()
    columns = episode(K)
    (states, actions, returns, stamps), padding = pad(columns, [K, 4, 1], left=True)
    expected = theirs(
        states=states, actions=actions, returns_to_go=returns.unsqueeze(-1) / 1000, timesteps=stamps,
        rewards=None, attention_mask=(~padding).long(),
    ).action_preds  # fmt: skip
    actual = ours(states, actions, returns, stamps, padding)
    assert_close(actual[~padding], expected[~padding], TIGHT)


@pytest.mark.parametrize("attention", CAUSAL)
def test_padding_changes_nothing_and_no_action_depends_on_later_steps(attention: str):
    model, columns, lengths = small(attention), episode(K), [K, 4, 1]
    step, inputs = 3, [c.clone().requires_grad_() for c in columns[:3]]
    grads = torch.autograd.grad(model(*inputs, columns[3])[:, step].sum(), inputs)
    for grad, last in zip(grads, (step, step - 1, step), strict=True):  # its own action is not an input
        assert grad[:, last + 1 :].abs().max() == 0
        assert grad[:, : last + 1].abs().amax() > 0
    unpadded = [model(*(c[row : row + 1, :n] for c in columns))[0] for row, n in enumerate(lengths)]
    for left in (True, False):
        padded, mask = pad(columns, lengths, left)
        actual = model(*padded, mask)
        for row, n in enumerate(lengths):
            assert_close(actual[row][~mask[row]], unpadded[row], TIGHT, f"left={left}, {n} steps")
    padded, mask = pad(columns, lengths, left=False)
    assert_close(model.predict(*padded, mask)[~mask], model(*padded, mask)[~mask], TIGHT)


def test_states_are_normalised_by_the_model_and_late_steps_share_a_stamp():
    model = small()
    states, actions, returns, stamps = episode(K)
    moved = small()
    moved.set_state_moments(torch.zeros(STATE), torch.ones(STATE) - 1e-6)
    normal = (states - model.state_mean) / model.state_std
    assert_close(moved(normal, actions, returns, stamps), model(states, actions, returns, stamps), 1e-6)
    late = model(states, actions, returns, stamps + 1000)
    assert torch.isfinite(late).all()
    assert_close(late, model(states, actions, returns, torch.full_like(stamps, 39)), TIGHT)
