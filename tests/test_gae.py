"""compute_gae against a slow version written from the definition, and against values known in closed form."""

import pytest
import torch

from ppo_atari import compute_gae

GAMMA, LAMBDA = 0.9, 0.8


def slow_gae(rewards, terminations, truncations, values, next_value, final_values, gamma, gae_lambda):
    """eq. 16: for each start the sum over its own future of (gamma lambda)^l delta, up to the end of the game."""
    num_steps, num_envs = rewards.shape
    advantages = torch.zeros(num_steps, num_envs, dtype=torch.float64)
    for n in range(num_envs):
        for start in range(num_steps):
            weight = 1.0
            for t in range(start, num_steps):
                if terminations[t, n]:
                    following = 0.0
                elif truncations[t, n]:
                    following = final_values[t, n].item()
                else:
                    following = (values[t + 1, n] if t + 1 < num_steps else next_value[n]).item()
                delta = rewards[t, n].item() + gamma * following - values[t, n].item()
                advantages[start, n] += weight * delta
                weight *= gamma * gae_lambda
                if terminations[t, n] or truncations[t, n]:
                    break
    return advantages


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_definition_with_all_kinds_of_ends(seed):
    g = torch.Generator().manual_seed(seed)
    shape = (40, 6)
    rewards, values, final_values = (torch.randn(shape, generator=g) for _ in range(3))
    next_value = torch.randn(shape[1], generator=g)
    terminations, truncations = (torch.rand(shape, generator=g) < 0.15 for _ in range(2))
    assert (terminations & truncations).any()
    assert (terminations ^ truncations).any()

    advantages, returns = compute_gae(
        rewards, terminations, truncations, values, next_value, final_values, GAMMA, LAMBDA
    )

    expected = slow_gae(rewards, terminations, truncations, values, next_value, final_values, GAMMA, LAMBDA)
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, advantages + values)


def advantages_of_one_game(end: str, value: float, final_value: float, gae_lambda: float) -> torch.Tensor:
    """Three steps of reward 1 with a constant value, ended by the last one."""
    flags = torch.zeros(3, 1, dtype=torch.bool)
    ended = flags.clone()
    ended[-1] = True
    return compute_gae(
        torch.ones(3, 1),
        ended if end in ("termination", "both") else flags,
        ended if end in ("truncation", "both") else flags,
        torch.full((3, 1), value),
        torch.tensor([1000.0]),  # belongs to the next game and must not be seen
        torch.full((3, 1), final_value),
        GAMMA,
        gae_lambda,
    )[0].flatten()


def test_right_values_of_an_endless_game_give_no_advantage_where_it_is_truncated():
    # reward 1 for ever is worth 1 / (1 - gamma)
    endless = 1 / (1 - GAMMA)
    advantages = advantages_of_one_game("truncation", endless, endless, LAMBDA)
    torch.testing.assert_close(advantages, torch.zeros(3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("end", ["termination", "both"])
def test_a_termination_is_worth_the_rewards_up_to_it(end):
    # lambda 1: the return of the rest of the game less the value
    advantages = advantages_of_one_game(end, 5.0, 77.0, 1.0)
    rest = torch.tensor([1 + GAMMA + GAMMA**2, 1 + GAMMA, 1.0])
    torch.testing.assert_close(advantages, rest - 5.0)


def test_what_a_termination_leaves_out_may_be_infinite():
    assert advantages_of_one_game("both", 5.0, float("inf"), LAMBDA).isfinite().all()
