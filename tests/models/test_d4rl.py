"""Decision Transformer: equal to transformers' own and to the authors' causal attention, padded and step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from closeness import assert_close
from primal_attention.models.d4rl import DecisionTransformer, select
from primal_attention.nn.baselines import attention_names, attention_traits
from primal_attention.nn.primal import PrimalAttention
from primal_attention.official import load_official

STATE, ACTION, K = 5, 3, 6
CAUSAL = [name for name in attention_names() if attention_traits(name).supports_causal]
STREAMING = ["softmax", *(name for name in CAUSAL if attention_traits(name).streams)]
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


def test_the_last_layer_is_causal_primal_attention_with_the_running_mean():
    model = DecisionTransformer(STATE, ACTION)
    assert model.attention_names == ("softmax", "softmax", "primal")
    layer = model.blocks[-1].attention
    assert isinstance(layer, PrimalAttention)
    assert (layer.causal, layer.data_dependent, layer.decay) == (True, False, None)


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


@pytest.mark.parametrize("attention", STREAMING)
def test_step_by_step_equals_the_window_within_k(attention: str):
    model = small(attention)
    states, actions, returns, stamps = episode(K)
    assert model.streams
    memory, previous = model.initial_state(3), None
    for t in range(K):
        window = model(*(c[:, : t + 1] for c in (states, actions, returns, stamps)))[:, -1]
        action, memory = model.act(states[:, t], returns[:, t], stamps[:, t], previous, memory)
        assert_close(action, window, TIGHT, f"step {t}")
        previous = actions[:, t]


def test_primal_memory_does_not_grow_and_episodes_can_leave_it():
    model = small("primal")
    states, actions, returns, stamps = episode(12)
    memory, previous, sizes = model.initial_state(3), None, []
    for t in range(12):
        if t == 5:
            rows = torch.tensor([0, 2])
            memory = select(memory, rows)
            states, actions, returns, stamps = (c[rows] for c in (states, actions, returns, stamps))
            previous = actions[:, t - 1]
        action, memory = model.act(states[:, t], returns[:, t], stamps[:, t], previous, memory)
        sizes.append(sum(t.numel() for b in memory for t in b.attention if isinstance(t, Tensor)))
        previous = actions[:, t]
    assert sizes[0] == sizes[4]
    assert sizes[5] == sizes[-1] == sizes[0] * 2 // 3
    assert_close(action, model(states, actions, returns, stamps)[:, -1], TIGHT)


def test_attention_without_a_state_or_a_causal_form_is_refused():
    model = small(["softmax", "flow"])
    assert not model.streams
    with pytest.raises(ValueError, match="layer 2's attention 'flow' has no state"):
        model.initial_state(1)
    with pytest.raises(ValueError, match="causal=True is not defined for attention 'linformer'"):
        small("linformer")


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
