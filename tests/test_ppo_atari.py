"""ppo_atari.py: formulas against brute force and hand-computed values, behaviour against the real games."""

import itertools
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import rows, scalars, train

import ppo_atari as ppo

BREAKOUT = "BreakoutNoFrameskip-v4"
SMALL = ["--num-envs", "4", "--num-steps", "32", "--num-minibatches", "2", "--update-epochs", "1"]


# ----- formulas ---------------------------------------------------------------------------------------------------------------
def test_gae_equals_the_sum_it_stands_for():
    """A_t = sum_k (gamma lambda)^k delta_{t+k}, the sum ending with the episode, added up term by term."""
    rng, (steps, envs), gamma, lam = np.random.default_rng(0), (40, 5), 0.97, 0.9
    rewards, values, next_values = rng.normal(size=(3, steps, envs))
    terminated = rng.random((steps, envs)) < 0.1
    truncated = (rng.random((steps, envs)) < 0.1) & ~terminated
    assert terminated.any() and truncated.any()
    expected = np.zeros((steps, envs))
    for n in range(envs):
        for t in range(steps):
            for k in range(t, steps):
                future = 0.0 if terminated[k, n] else next_values[k, n]
                expected[t, n] += (gamma * lam) ** (k - t) * (rewards[k, n] + gamma * future - values[k, n])
                if terminated[k, n] or truncated[k, n]:
                    break
    tensors = [torch.from_numpy(x) for x in (rewards, values, next_values, terminated, terminated | truncated)]
    np.testing.assert_allclose(ppo.compute_gae(*tensors, gamma, lam).numpy(), expected, rtol=1e-10, atol=1e-10)


def test_gae_of_an_endless_reward_is_the_discounted_sum():
    """With lambda = 1 and V = 0, the advantage is the discounted sum of rewards plus the discounted last value."""
    rewards, zeros, never = torch.ones(10, 1), torch.zeros(10, 1), torch.zeros(10, 1, dtype=torch.bool)
    next_values = zeros.clone()
    next_values[-1] = 1 / (1 - 0.9)  # what an endless reward of 1 is worth
    ended = never.clone()
    ended[-1] = True  # a time limit: its estimate stays in
    advantages = ppo.compute_gae(rewards, zeros, next_values, never, ended, 0.9, 1.0)
    assert advantages[0].item() == pytest.approx(10.0)
    advantages = ppo.compute_gae(rewards, zeros, next_values, ended, ended, 0.9, 1.0)  # a death: it does not
    assert advantages[0].item() == pytest.approx((1 - 0.9**10) / 0.1)


def test_clipped_policy_loss_by_hand():
    # ratio 1.5 and 0.5, clip 0.2: A > 0 is cut at 1.2 above and not below; A < 0 is cut at 0.8 below and not above.
    ratios, advantages = torch.tensor([1.5, 0.5, 1.5, 0.5]), torch.tensor([2.0, 2.0, -2.0, -2.0])
    expected = -np.mean([1.2 * 2, 0.5 * 2, 1.5 * -2, 0.8 * -2])
    assert ppo.clipped_policy_loss(ratios.log(), advantages, 0.2).item() == pytest.approx(expected, rel=1e-6)


def test_clipped_value_loss_by_hand():
    values, old, returns = torch.tensor([1.0, 0.05, -1.0]), torch.zeros(3), torch.tensor([2.0, 1.0, 0.0])
    # (V - R)^2 = 1, 0.9025, 1; clipped V = 0.1, 0.05, -0.1 gives 3.61, 0.9025, 0.01; the larger counts
    assert ppo.clipped_value_loss(values, old, returns, 0.1).item() == pytest.approx(0.5 * np.mean([3.61, 0.9025, 1.0]))
    assert ppo.clipped_value_loss(values, old, returns, None).item() == pytest.approx(0.5 * np.mean([1.0, 0.9025, 1.0]))


def test_ppo_loss_by_hand():
    class Fixed(torch.nn.Module):
        def forward(self, obs):
            return torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]]), torch.tensor([1.0, 0.0])

    args = ppo.Args(norm_adv=False, clip_vloss=False, ent_coef=0.1, vf_coef=0.5)
    mb = {"obs": torch.zeros(2), "masks": torch.ones(2, 2, dtype=torch.bool), "actions": torch.tensor([1, 0])}
    mb |= {"log_probs": torch.tensor([0.5, 0.5]).log(), "values": torch.zeros(2)}
    mb |= {"advantages": torch.tensor([1.0, -1.0]), "returns": torch.tensor([3.0, 1.0])}
    loss, metrics = ppo.ppo_loss(Fixed(), mb, torch.tensor(0.2), args)
    policy = -np.mean([1.2, -1.0])  # ratios 0.75 / 0.5 = 1.5, cut to 1.2, and 1
    value = 0.5 * np.mean([4.0, 1.0])
    entropy = np.mean([-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)), np.log(2)])
    k1, k3 = -np.log(1.5) / 2, (0.5 - np.log(1.5)) / 2
    assert metrics.tolist() == pytest.approx([policy, value, entropy, k1, k3, 0.5], rel=1e-5)
    assert loss.item() == pytest.approx(policy + 0.5 * value - 0.1 * entropy, rel=1e-5)
    normalised = ppo.ppo_loss(Fixed(), mb, torch.tensor(0.2), ppo.Args())[1][0].item()  # advantages 1, -1 -> +-1 / sqrt(2)
    assert normalised == pytest.approx(policy / math.sqrt(2), rel=1e-5)


def test_masked_actions_have_no_probability_gradient_or_entropy():
    torch.manual_seed(0)
    logits = (10 * torch.randn(200, 6)).requires_grad_()
    mask = torch.rand(200, 6) < 0.5
    mask[:, 2] = True
    log_probs = ppo.masked_log_probs(logits, mask)
    assert not log_probs.exp()[~mask].any()
    sampled = torch.multinomial(log_probs.exp(), 100, replacement=True)
    assert mask.gather(1, sampled).all()
    entropy = ppo.masked_entropy(log_probs, mask)
    for i in range(200):  # the entropy of the distribution over the allowed actions alone
        expected = torch.distributions.Categorical(logits=logits[i][mask[i]]).entropy()
        assert entropy[i].item() == pytest.approx(expected.item(), abs=1e-5)
    (entropy.sum() + log_probs.gather(1, sampled[:, :1]).sum()).backward()
    assert logits.grad.isfinite().all() and logits.grad[mask].any() and not logits.grad[~mask].any()


def test_value_norm_is_a_bias_corrected_average():
    norm, rng = ppo.ValueNorm(momentum=0.9), np.random.default_rng(0)
    assert [x.item() for x in norm.statistics()] == [0.0, 1.0]
    batches = rng.normal(100, 10, size=(5, 16, 4))
    for batch in batches:
        norm.update(torch.from_numpy(batch).float())
    weights = 0.1 * 0.9 ** np.arange(4, -1, -1)
    mean = np.average(batches.mean((1, 2)), weights=weights)
    std = np.sqrt(np.average((batches**2).mean((1, 2)), weights=weights) - mean**2)
    assert [x.item() for x in norm.statistics()] == pytest.approx([mean, std], rel=1e-3)


# ----- the game ---------------------------------------------------------------------------------------------------------------
def test_a_lost_life_does_not_restart_the_game_and_the_game_over_does():
    envs, rng = ppo.AtariGames(BREAKOUT, 4, False), np.random.default_rng(0)
    _, info = envs.reset(seed=0)
    lost, finished = np.zeros(4, dtype=int), 0
    for _ in range(1000):
        before = info
        _, _, terminated, truncated, info = envs.step(rng.integers(0, 4, 4))
        assert not truncated.any()
        goes_on = ~info["game_over"]
        frames = info["episode_frame_number"] - before["episode_frame_number"]
        assert (frames[goes_on] == 4).all()  # no restart, and every step is four frames
        lost += terminated
        assert (info["lives"][goes_on] == 5 - lost[goes_on]).all()
        assert (lost[info["game_over"]] == 5).all() and (info["lives"][info["game_over"]] == 5).all()
        finished += info["game_over"].sum()
        lost[info["game_over"]] = 0
    envs.close()
    assert finished >= 8


def test_logged_returns_are_the_raw_scores_of_whole_games(tmp_path, monkeypatch):
    """The rewards of the real game, recorded on their way in, against episodes.csv and TensorBoard."""
    games, open_games, step = [], [[0.0, 0, 0] for _ in range(4)], ppo.AtariGames.step

    def recording_step(self, actions):
        result = step(self, actions)
        for game, reward, terminated, over in zip(open_games, result[1], result[2], result[4]["game_over"], strict=True):
            game[0], game[1], game[2] = game[0] + reward, game[1] + 1, game[2] + terminated
            if over:
                games.append(tuple(game))
                game[:] = [0.0, 0, 0]
        return result

    monkeypatch.setattr(ppo.AtariGames, "step", recording_step)
    run = train(ppo, tmp_path, monkeypatch, "--env-id", "SpaceInvadersNoFrameskip-v4", "--total-timesteps", 12_000, *SMALL)
    logged = [(float(row["episodic_return"]), int(row["episodic_length"])) for row in rows(run / "episodes.csv")]
    assert len(games) >= 3 and logged == [game[:2] for game in games]
    assert all(lives_lost == 3 for _, _, lives_lost in games)  # three lives a game of Space Invaders
    assert any(score > 100 for score, _, _ in games)  # in the game's points, not in signs
    assert [value for _, value in scalars(run)["charts/episodic_return"]] == [score for score, _ in logged]
    expected = {f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS", "learning_rate", "mean_return_100")}
    losses = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "explained_variance"]
    assert expected | {f"losses/{name}" for name in losses} == set(scalars(run))


@pytest.mark.parametrize("env_id, sticky", [(BREAKOUT, False), ("ALE/Breakout-v5", True)])
def test_a_step_is_four_frames_of_the_plain_emulator(env_id, sticky):
    """Played again frame by frame in Gymnasium's own environment: equal rewards and lives, unless actions are sticky."""
    envs, plain = ppo.AtariGames(env_id, 1, False), gym.make(BREAKOUT)
    _, info = envs.reset(seed=5)
    plain.reset()
    for frame in range(int(info["frame_number"][0])):
        plain.step(1 if frame == 0 else 0)  # one FIRE, then no-ops
    ours, theirs = [], []
    for action in np.random.default_rng(0).integers(0, 4, 400):
        _, reward, _, _, info = envs.step(np.array([action]))
        if info["game_over"][0]:
            break
        frames = [plain.step(action) for _ in range(4)]
        ours.append((float(reward[0]), int(info["lives"][0])))
        theirs.append((sum(frame[1] for frame in frames), frames[-1][4]["lives"]))
    envs.close()
    plain.close()
    assert len(ours) > 50 and (ours != theirs) == sticky


def test_masked_actions_are_never_played(tmp_path, monkeypatch):
    played, masks, step, loss = set(), [], ppo.AtariGames.step, ppo.ppo_loss

    def recording_step(self, actions):
        played.update(actions.tolist())
        return step(self, actions)

    def recording_loss(agent, mb, clip_coef, args):
        masks.append(mb["masks"])
        return loss(agent, mb, clip_coef, args)

    monkeypatch.setattr(ppo.AtariGames, "step", recording_step)
    monkeypatch.setattr(ppo, "ppo_loss", recording_loss)
    train(ppo, tmp_path, monkeypatch, "--full-action-space", "--mask-actions", "--total-timesteps", 1024, *SMALL)
    assert played == {0, 1, 3, 4}  # of 18: NOOP, FIRE, RIGHT and LEFT
    assert all(mask.nonzero()[:, 1].unique().tolist() == [0, 1, 3, 4] for mask in masks)


def test_rewards_are_clipped_and_lost_lives_end_the_bootstrap(tmp_path, monkeypatch):
    gae, seen = ppo.compute_gae, []

    def recording_gae(*inputs):
        seen.append([tensor.clone() for tensor in inputs[:5]])
        return gae(*inputs)

    monkeypatch.setattr(ppo, "compute_gae", recording_gae)
    arguments = ["--env-id", "SpaceInvadersNoFrameskip-v4", "--total-timesteps", 6000, "--learning-rate", 1e-30, *SMALL]
    run = train(ppo, tmp_path, monkeypatch, *arguments, "--precision", "fp32")
    rewards, _, _, terminated, done = (torch.cat(tensors) for tensors in zip(*seen, strict=True))
    games = len(rows(run / "episodes.csv"))
    assert set(rewards.unique().tolist()) == {0.0, 1.0}
    assert terminated.sum() >= 3 * games > 0 and torch.equal(terminated, done)  # three lives a game, and no time limit
    for before, after in itertools.pairwise(seen):  # the network does not change here, so
        torch.testing.assert_close(before[2][-1], after[1][0], rtol=0, atol=1e-6)  # V(s_T) is what the next rollout starts with
    seen.clear()
    train(ppo, tmp_path, monkeypatch, *arguments, "--no-clip-reward")
    assert torch.cat([iteration[0] for iteration in seen]).max() >= 5  # the game's points


def test_time_limit_bootstraps_from_the_final_observation(tmp_path, monkeypatch):
    """Games cut after 200 frames: V(s') at the cut is that of the final frame, not of the next game's first one."""
    native, step, gae, finals, seen = ppo.AtariVectorEnv.__init__, ppo.AtariGames.step, ppo.compute_gae, [], []
    monkeypatch.setattr(ppo.AtariVectorEnv, "__init__", lambda self, **kw: native(self, max_num_frames_per_episode=200, **kw))

    def recording_step(self, actions):
        result = step(self, actions)
        finals.append(result[4]["final_obs"].copy() if result[3].any() else None)
        return result

    def recording_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
        seen.append((values, next_values, terminated, done))
        return gae(rewards, values, next_values, terminated, done, gamma, gae_lambda)

    monkeypatch.setattr(ppo.AtariGames, "step", recording_step)
    monkeypatch.setattr(ppo, "compute_gae", recording_gae)
    size = ["--num-envs", 2, "--num-steps", 128, "--num-minibatches", 1, "--update-epochs", 1, "--precision", "fp32"]
    run = train(ppo, tmp_path, monkeypatch, "--env-id", "PongNoFrameskip-v4", "--total-timesteps", 256, "--seed", 3, *size)
    torch.manual_seed(3)
    agent = ppo.Agent(6)  # the network as it was during this first rollout
    values, next_values, terminated, done = seen[0]
    assert done.sum() >= 4 and not terminated.any()
    for t, n in done.nonzero().tolist():
        with torch.no_grad():
            assert next_values[t, n].item() == pytest.approx(agent(torch.from_numpy(finals[t][n : n + 1]))[1].item(), abs=1e-5)
    going_on = ~done[:-1]
    assert torch.equal(next_values[:-1][going_on], values[1:][going_on])
    assert len(rows(run / "episodes.csv")) == done.sum()


def test_first_minibatch_has_ratio_one_and_uint8_frames(tmp_path, monkeypatch):
    seen, loss = [], ppo.ppo_loss

    def recording_loss(agent, mb, clip_coef, args):
        if not seen:
            with torch.no_grad():
                log_probs = ppo.masked_log_probs(agent(mb["obs"])[0], mb["masks"])
            seen.append((log_probs.gather(1, mb["actions"].unsqueeze(1)).squeeze(1) - mb["log_probs"]).exp())
            assert mb["obs"].dtype == torch.uint8 and mb["obs"].shape == (64, 4, 84, 84)
        return loss(agent, mb, clip_coef, args)

    monkeypatch.setattr(ppo, "ppo_loss", recording_loss)
    train(ppo, tmp_path, monkeypatch, "--precision", "fp32", "--total-timesteps", 128, *SMALL)
    assert (seen[0] - 1).abs().max() < 1e-5


# ----- the run ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make, num_envs",
    [
        (lambda: ppo.AtariGames("ALE/Breakout-v5", 4, False), 4),  # sticky actions, lost lives, games of unequal length
        (
            lambda: gym.make_vec(
                "CartPole-v1", 3, "sync", vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
            ),
            3,
        ),
    ],
    ids=["ale", "gymnasium"],
)
def test_environments_are_put_back_where_they_were(make, num_envs):
    rng, envs = np.random.default_rng(0), ppo.ResumableVectorEnv(make(), seed=7, interval=600)
    actions = rng.integers(0, 2, (1500, num_envs))
    envs.reset()
    for action in actions[:1000]:
        obs, *_ = envs.step(action)
    state = envs.state_dict()
    assert len(set(state["start"].tolist())) > 1 and (state["segment"] > 0).all()  # logs of unequal length
    assert len(state["actions"]) < 1000 and state["actions"].dtype == torch.uint8
    copy = ppo.ResumableVectorEnv(make(), seed=7, interval=600)
    np.testing.assert_array_equal(copy.load_state_dict(state)[0], obs)
    for action in actions[1000:]:
        (*results, info), (*copied, copied_info) = envs.step(action), copy.step(action)
        for one, other in zip(results, copied, strict=True):
            np.testing.assert_array_equal(one, other)
        for key in info.keys() & {"game_over", "lives", "episode_frame_number"}:
            np.testing.assert_array_equal(info[key], copied_info[key])
    envs.close()
    copy.close()


def test_evaluation_scores_whole_games_and_repeats(tmp_path, monkeypatch):
    run = train(ppo, tmp_path, monkeypatch, "--total-timesteps", 128, *SMALL)
    scores = ppo.evaluate(run, episodes=6, seed=3)
    assert len(scores) == 6 and scores == ppo.evaluate(run, episodes=6, seed=3)
    assert scores != ppo.evaluate(run, episodes=6, seed=4)
    assert max(scores) > 1  # of five lives
    greedy = ppo.evaluate(run, episodes=1, seed=3, greedy=True)  # always the same action here: the untrained policy is constant
    assert greedy == ppo.evaluate(run, episodes=1, seed=3, greedy=True) and greedy[0] <= 11


def test_value_targets_are_normalised_after_gae_and_old_values_with_the_same_statistics(tmp_path, monkeypatch):
    gae, loss, seen, batches = ppo.compute_gae, ppo.ppo_loss, [], []

    def recording_gae(rewards, values, *rest):
        seen.append((values.clone(), gae(rewards, values, *rest)))
        return seen[-1][1]

    def recording_loss(agent, mb, *rest):
        batches.append({name: tensor.clone() for name, tensor in mb.items()})
        return loss(agent, mb, *rest)

    monkeypatch.setattr(ppo, "compute_gae", recording_gae)
    monkeypatch.setattr(ppo, "ppo_loss", recording_loss)
    size = ["--num-envs", 4, "--num-steps", 128, "--num-minibatches", 1, "--update-epochs", 1, "--total-timesteps", 1024]
    arguments = ["--norm-value-targets", "--no-clip-reward", "--env-id", "SpaceInvadersNoFrameskip-v4", *size]
    run = train(ppo, tmp_path, monkeypatch, *arguments)
    norm = ppo.ValueNorm()
    for (values, advantages), mb in zip(seen, batches, strict=True):
        returns = values + advantages  # in the game's points
        norm.update(returns)
        mean, std = norm.statistics()
        for name, raw in (("returns", returns), ("values", values)):
            torch.testing.assert_close(mb[name].sort()[0], ((raw - mean) / std).flatten().sort()[0], rtol=1e-4, atol=1e-4)
    assert batches[0]["returns"].mean().abs() < 1e-3 and (batches[0]["returns"].std() - 1).abs() < 0.01
    assert (seen[1][0].mean() - norm.statistics()[0]).abs() < 3 * norm.statistics()[1]  # values are back in points
    assert torch.equal(ppo.load_checkpoint(run)["value_norm"]["moments"], norm.moments)


def test_schedules(tmp_path, monkeypatch):
    clips, loss = [], ppo.ppo_loss
    monkeypatch.setattr(ppo, "ppo_loss", lambda agent, mb, clip, args: clips.append(clip.item()) or loss(agent, mb, clip, args))
    size = ["--total-timesteps", 512, "--num-envs", 4, "--num-steps", 32, "--num-minibatches", 1, "--update-epochs", 1]
    run = train(ppo, tmp_path, monkeypatch, *size, "--anneal-clip")
    rates = [float(row["learning_rate"]) for row in rows(run / "metrics.csv")]
    assert rates == pytest.approx([2.5e-4, 1.875e-4, 1.25e-4, 0.625e-4]) and clips == pytest.approx([0.1, 0.075, 0.05, 0.025])
    run = train(ppo, tmp_path, monkeypatch, *size, "--no-anneal-lr")
    assert {row["learning_rate"] for row in rows(run / "metrics.csv")} == {"0.00025"} and clips[4:] == pytest.approx([0.1] * 4)


def test_target_kl_stops_the_epochs(tmp_path, monkeypatch):
    calls, loss = [], ppo.ppo_loss
    monkeypatch.setattr(ppo, "ppo_loss", lambda *inputs: calls.append(1) or loss(*inputs))
    size = ["--num-envs", 4, "--num-steps", 32, "--num-minibatches", 2, "--total-timesteps", 128, "--learning-rate", 0.01]
    train(ppo, tmp_path, monkeypatch, *size)
    assert len(calls) == 8
    train(ppo, tmp_path, monkeypatch, *size, "--target-kl", 1e-6)
    assert len(calls) == 8 + 2
