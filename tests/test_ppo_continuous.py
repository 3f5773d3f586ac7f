"""ppo_continuous.py: formulas against brute force and independent libraries, behaviour in real and in tiny environments."""

import copy
import math
import os
import signal
import subprocess
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import command, only_run, rows, saved, scalars, train, wait_for_rows

import ppo_continuous as ppo

SMALL = ["--num-envs", "2", "--num-steps", "64", "--num-minibatches", "4", "--update-epochs", "2"]
HOPPER = ["--env-id", "Hopper-v5", *SMALL]


class Endless(gym.Env):
    """Pays 1 a step and never ends by itself: what it is worth is 1 / (1 - gamma), wherever a time limit cuts it."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), 1.0, False, False, {}


class Recorder(gym.Env):
    """Takes [2, 2] actions within -0.1 and 0.1, gives nested observations, and remembers everything."""

    observation_space = gym.spaces.Dict(
        {"place": gym.spaces.Box(-np.inf, np.inf, (2, 2)), "phase": gym.spaces.Discrete(3), "clock": gym.spaces.Box(0, 9, (1,))}
    )
    action_space = gym.spaces.Box(-0.1, 0.1, (2, 2), np.float32)
    made: ClassVar[list] = []

    def __init__(self):
        self.seen, self.actions, self.rewards, self.endings = [], [], [], []
        Recorder.made.append(self)

    def look(self):
        place = self.np_random.normal(1000, 5, (2, 2)).astype(np.float32)
        obs = {"place": place, "phase": self.time % 3, "clock": np.array([min(self.time, 9)], dtype=np.float32)}
        self.seen.append(gym.spaces.flatten(self.observation_space, obs))
        return obs

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.look(), {"game_over": np.array([5])}  # an info key that must not be taken for the script's own

    def step(self, action):
        self.time += 1
        self.actions.append(action)
        self.rewards.append(float(self.np_random.normal(3, 20)))
        self.endings.append((self.time == 7, self.time == 11))
        if self.np_random.random() < 0.5 and self.time == 7:
            self.endings[-1] = (False, False)
        return self.look(), self.rewards[-1], *self.endings[-1], {"game_over": np.array([5])}


class Picture(Endless):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)


class Story(Endless):
    observation_space = gym.spaces.Sequence(gym.spaces.Discrete(5))


@pytest.fixture(autouse=True, scope="module")
def tiny_environments():
    names = {"Endless-v0": (Endless, 10), "Recorder-v0": (Recorder, None), "Picture-v0": (Picture, 10), "Story-v0": (Story, 10)}
    for name, (env, limit) in names.items():
        gym.register(name, env, max_episode_steps=limit)
    yield
    for name in names:
        gym.registry.pop(name)


@pytest.fixture
def recorder():
    Recorder.made.clear()
    return Recorder


# ----- formulas ---------------------------------------------------------------------------------------------------------------
def test_log_prob_and_entropy_equal_those_of_torch_distributions():
    torch.manual_seed(0)
    mean, log_std, actions = torch.randn(50, 4), torch.randn(1, 4), 3 * torch.randn(50, 4)
    normal = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp().expand(50, 4)), 1)
    torch.testing.assert_close(ppo.gaussian_log_prob(actions, mean, log_std), normal.log_prob(actions), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ppo.gaussian_entropy(log_std).expand(50), normal.entropy(), rtol=1e-5, atol=1e-5)


def test_policy_mean_is_the_network_in_numpy():
    torch.manual_seed(0)
    agent, obs = ppo.Agent(5, 3, "none"), torch.randn(20, 5)
    weights = [parameter.detach().numpy() for parameter in agent.actor_mean.parameters()]
    expected, _, _ = agent(obs)
    np.testing.assert_allclose(ppo.policy_mean(weights, obs.numpy()), expected.detach().numpy(), rtol=0, atol=1e-6)


def test_ppo_loss_by_hand():
    class Fixed(torch.nn.Module):
        def forward(self, obs):  # standard deviation 1: the log probability is -x^2 / 2 and a constant
            return torch.tensor([[0.0], [1.0]]), torch.zeros(1, 1), torch.tensor([1.0, 0.0])

    args, constant = ppo.Args(norm_adv=False, clip_vloss=False, ent_coef=0.1, vf_coef=0.5), -0.5 * math.log(2 * math.pi)
    mb = {"obs": torch.zeros(2, 1), "actions": torch.tensor([[2.0], [1.0]]), "values": torch.zeros(2)}
    mb |= {"log_probs": torch.tensor([-2 - math.log(1.5), 0.0]) + constant}  # ratios 1.5, cut to 1.2, and 1
    mb |= {"advantages": torch.tensor([1.0, -1.0]), "returns": torch.tensor([3.0, 1.0])}
    loss, metrics = ppo.ppo_loss(Fixed(), mb, torch.tensor(0.2), args)
    policy, value, entropy = -np.mean([1.2, -1.0]), 0.5 * np.mean([4.0, 1.0]), 0.5 * math.log(2 * math.pi * math.e)
    k1, k3 = -np.log(1.5) / 2, (0.5 - np.log(1.5)) / 2
    assert metrics.tolist() == pytest.approx([policy, value, entropy, k1, k3, 0.5], rel=1e-5)
    assert loss.item() == pytest.approx(policy + 0.5 * value - 0.1 * entropy, rel=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_running_norm_is_numpy_over_the_whole_stream(offset):
    rng, norm = np.random.default_rng(0), ppo.RunningNorm((3,))
    stream = offset + rng.normal([0, 5, -2], [1, 10, 0.1], size=(500, 3))
    for size, batch in zip(range(1, 30), np.split(stream, np.cumsum(range(1, 30))), strict=False):
        assert len(batch) == size
        norm.update(batch)
    seen = stream[: sum(range(1, 30))]
    np.testing.assert_allclose(norm.mean, seen.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.var, seen.var(0), rtol=1e-7)
    expected = (seen - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)
    np.testing.assert_allclose(norm(seen), expected.clip(-10, 10), rtol=1e-5, atol=1e-7)
    assert norm(np.full((1, 3), offset + 1e5)).tolist() == [[10, 10, 10]]


def test_moving_norm_is_the_weighted_numpy_average():
    rng, norm = np.random.default_rng(0), ppo.RunningNorm((2,), momentum=0.9)
    batches = rng.normal(100, 10, size=(40, 4, 2))
    for batch in batches:
        norm.update(batch)
    weights = 0.9 ** np.arange(39, -1, -1)  # bias correction: weights that add up to 1 from the first batch on
    mean = np.average(batches.mean(1), axis=0, weights=weights)
    var = np.average(((batches - mean) ** 2).mean(1), axis=0, weights=weights)
    np.testing.assert_allclose(norm.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(norm.var, var, rtol=1e-12)


def test_statistics_travel_with_the_weights():
    agent = ppo.Agent(3, 1, "welford")
    agent.obs_norm.update(np.random.default_rng(0).normal(7, 2, (50, 3)))
    other = ppo.Agent(3, 1, "welford")
    other.load_state_dict(agent.state_dict())
    assert other.obs_norm.count == 50 and (other.obs_norm.mean == agent.obs_norm.mean).all()
    agent.obs_norm.update(np.zeros((9, 3)))
    assert other.obs_norm.count == 50  # a copy, not a view
    with pytest.raises(ValueError, match="mean"):
        ppo.RunningNorm((4,)).load_state_dict(agent.obs_norm.state_dict())
    with pytest.raises(RuntimeError):
        ppo.Agent(3, 1, "none").load_state_dict(agent.state_dict())


def test_discounted_sums_by_brute_force_and_in_parts():
    rng, gamma = np.random.default_rng(0), 0.9
    rewards, done = rng.normal(size=(60, 3)), rng.random((60, 3)) < 0.1
    expected = np.zeros((60, 3))
    for n in range(3):
        for t in range(60):
            start = max((k + 1 for k in range(t) if done[k, n]), default=0)
            expected[t, n] = sum(gamma ** (t - k) * rewards[k, n] for k in range(start, t + 1))
    first, between = ppo.discounted_sums(rewards[:25], done[:25], np.zeros(3), gamma)
    second, _ = ppo.discounted_sums(rewards[25:], done[25:], between, gamma)
    np.testing.assert_allclose(np.concatenate([first, second]), expected, rtol=1e-12, atol=1e-12)


def test_one_flat_vector_learns_what_thirteen_tensors_learn():
    torch.manual_seed(0)
    agent = ppo.Agent(4, 2, "none")
    other = copy.deepcopy(agent)
    flat = ppo.flatten_parameters(agent)
    optimizers = [torch.optim.Adam(p, lr=0.01, eps=1e-5, fused=True) for p in ([flat], other.parameters())]
    for scale in (1.0, 1e-4, 3.0, 10.0):  # clipped and not clipped
        batch = torch.randn(8, 4)
        for network in (agent, other):
            mean, log_std, value = network(batch)
            loss = scale * (mean.square().sum() + log_std.exp().sum() + (value - 1).square().sum())
            (flat.grad.zero_ if network is agent else optimizers[1].zero_grad)()
            loss.backward()
        flat.grad *= (0.5 / (flat.grad.norm() + 1e-6)).clamp(max=1.0)
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        for one, two in zip(agent.parameters(), other.parameters(), strict=True):
            assert one.grad.any() or not two.grad.any()
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


# ----- the environment --------------------------------------------------------------------------------------------------------
def test_what_the_agent_sees_does_and_is_paid(tmp_path, monkeypatch, recorder):
    """Nested observations in one vector, normalised by all seen so far; actions bounded; rewards raw in the logs."""
    gae, loss, rewards_seen, batches = ppo.compute_gae, ppo.ppo_loss, [], []
    monkeypatch.setattr(ppo, "compute_gae", lambda *inputs: rewards_seen.append(inputs[0].clone()) or gae(*inputs))
    monkeypatch.setattr(ppo, "ppo_loss", lambda agent, mb, *rest: batches.append(mb) or loss(agent, mb, *rest))
    size = ["--num-envs", 2, "--num-steps", 128, "--num-minibatches", 1, "--update-epochs", 1, "--total-timesteps", 512]
    run = train(ppo, tmp_path, monkeypatch, "--env-id", "Recorder-v0", *size)
    made = [env for env in recorder.made if env.actions]
    assert len(made) == 2 and all(len(env.actions) == 256 for env in made)
    # Observations: all that the agent acted on, those that only ended an episode are not among them.
    acted_on = []
    for env in made:
        seen, over = iter(env.seen), [any(ending) for ending in env.endings]
        acted_on.append(next(seen))
        for done in over[:-1]:
            obs = next(seen)
            acted_on.append(next(seen) if done else obs)
    acted_on = np.array(acted_on, dtype=np.float64)
    assert acted_on.shape == (512, 8)
    statistics = saved(run)["agent"]["obs_norm._extra_state"]
    assert statistics["count"] == 512
    np.testing.assert_allclose(statistics["mean"].numpy(), acted_on.mean(0), rtol=1e-9)
    np.testing.assert_allclose(statistics["var"].numpy(), acted_on.var(0), rtol=1e-9)
    # Actions: [2, 2], cut to the bounds for the environment alone.
    actions = np.array([env.actions for env in made])
    assert actions.shape == (2, 256, 2, 2) and np.abs(actions).max() == np.float32(0.1)
    assert batches[0]["actions"].shape == (256, 4) and batches[0]["actions"].abs().max() > 2
    # Rewards: raw in the log; scaled by the spread of the discounted sums for the learner.
    rewards = np.array([env.rewards for env in made]).T
    done = np.array([[any(ending) for ending in env.endings] for env in made]).T
    episodes = []
    for n in range(2):
        for part in np.split(np.arange(256), np.flatnonzero(done[:, n]) + 1):
            if len(part) and done[part[-1], n]:
                episodes.append((2 * (part[-1] + 1), rewards[part, n].sum(), len(part)))
    logged = [
        [float(row[k]) for k in ("global_step", "episodic_return", "episodic_length")] for row in rows(run / "episodes.csv")
    ]
    np.testing.assert_allclose(sorted(logged), sorted(episodes), rtol=1e-8)
    assert [value for _, value in scalars(run)["charts/episodic_return"]] == pytest.approx([row[1] for row in logged], rel=1e-6)
    sums, _ = ppo.discounted_sums(rewards, done, np.zeros(2), 0.99)
    for i in range(2):
        spread = np.sqrt(sums[: 128 * (i + 1)].var() + 1e-8)
        expected = (rewards[128 * i : 128 * (i + 1)] / spread).clip(-10, 10)
        np.testing.assert_allclose(rewards_seen[i].numpy(), expected, rtol=1e-4)


def test_without_normalisation_everything_is_raw(tmp_path, monkeypatch, recorder):
    gae, loss, rewards_seen, batches = ppo.compute_gae, ppo.ppo_loss, [], []
    monkeypatch.setattr(ppo, "compute_gae", lambda *inputs: rewards_seen.append(inputs[0].clone()) or gae(*inputs))
    monkeypatch.setattr(ppo, "ppo_loss", lambda agent, mb, *rest: batches.append(mb) or loss(agent, mb, *rest))
    size = ["--num-envs", 1, "--num-steps", 64, "--num-minibatches", 1, "--update-epochs", 1, "--total-timesteps", 64]
    train(ppo, tmp_path, monkeypatch, "--env-id", "Recorder-v0", "--obs-norm", "none", "--no-norm-reward", *size)
    (env,) = (env for env in recorder.made if env.actions)
    np.testing.assert_allclose(rewards_seen[0][:, 0].numpy(), env.rewards, rtol=1e-6)
    assert 900 < batches[0]["obs"][:, 4:8].mean() < 1100


def test_time_limit_bootstraps_from_the_final_observation(tmp_path, monkeypatch, recorder):
    """V(s') is that of the true last observation at a cut, and does not count at an end."""
    gae, seen, agents, loss = ppo.compute_gae, [], [], ppo.ppo_loss
    monkeypatch.setattr(ppo, "compute_gae", lambda *inputs: seen.append(inputs) or gae(*inputs))
    monkeypatch.setattr(
        ppo, "ppo_loss", lambda agent, *rest: agents or agents.append(copy.deepcopy(agent)) or loss(agent, *rest)
    )
    size = ["--num-envs", 2, "--num-steps", 128, "--num-minibatches", 1, "--update-epochs", 1, "--total-timesteps", 256]
    train(ppo, tmp_path, monkeypatch, "--env-id", "Recorder-v0", "--obs-norm", "none", *size)
    _, values, next_values, terminated, done = seen[0][:5]
    checked = 0
    for n, env in enumerate(env for env in recorder.made if env.actions):
        seen_obs = iter(env.seen)
        next(seen_obs)
        for t, (ended, cut) in enumerate(env.endings):
            successor = next(seen_obs)
            assert (bool(terminated[t, n]), bool(done[t, n])) == (ended, ended or cut)
            if cut:
                with torch.no_grad():
                    expected = agents[0].critic(torch.from_numpy(np.asarray(successor, dtype=np.float32)))
                assert next_values[t, n].item() == pytest.approx(expected.item(), rel=1e-4)
                checked += 1
            elif not ended and t < 127:
                assert next_values[t, n] == values[t + 1, n]
            if ended or cut:
                next(seen_obs)
    assert checked >= 5 and terminated.any()


@pytest.mark.parametrize("flags", [["--no-norm-reward"], ["--no-norm-reward", "--norm-value-targets"], []])
def test_an_endless_reward_is_worth_its_whole_future(tmp_path, monkeypatch, flags):
    """Ten steps at 1 each are worth 6.5 if the time limit were the end, and 10 as it is not (gamma 0.9)."""
    gae, values, scales = ppo.compute_gae, [], []

    def recording_gae(rewards, old_values, *rest):
        values.append(old_values.mean().item())
        scales.append(rewards.mean().item())  # what a raw reward of 1 has become
        return gae(rewards, old_values, *rest)

    monkeypatch.setattr(ppo, "compute_gae", recording_gae)
    size = ["--num-envs", 4, "--num-steps", 64, "--num-minibatches", 4, "--total-timesteps", 256 * 80, "--gamma", 0.9]
    train(ppo, tmp_path, monkeypatch, "--env-id", "Endless-v0", *size, "--learning-rate", 3e-3, *flags)
    assert values[-1] / scales[-1] == pytest.approx(10, abs=0.5)
    assert (1 - 0.9**10) / 0.1 < 6.6


def test_workers_play_what_one_process_plays(tmp_path, monkeypatch):
    runs = [
        train(ppo, tmp_path, monkeypatch, *HOPPER, "--vector-mode", m, "--total-timesteps", 1500) for m in ("sync", "async")
    ]
    one, other = (rows(run / "episodes.csv") for run in runs)
    assert one == other and len(one) > 10
    assert rows(runs[0] / "metrics.csv") == rows(runs[1] / "metrics.csv")


def test_ctrl_c_reaches_the_workers_too_and_the_run_is_saved(tmp_path):
    arguments = [*HOPPER, "--vector-mode", "async", "--total-timesteps", 500_000]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command(ppo.__file__, *arguments), cwd=tmp_path, start_new_session=True, **pipes)
    wait_for_rows(process, tmp_path, 5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT and "stopped and saved" in output
    assert "Traceback" not in errors and saved(only_run(tmp_path))["global_step"] >= 5 * 128


@pytest.mark.parametrize(
    "env_id, says", [("Picture-v0", "shows images"), ("Story-v0", "cannot be flattened"), ("Broken-v0", "out of order")]
)
def test_environments_that_do_not_fit_are_named(env_id, says, capsys):
    def broken():
        raise RuntimeError("out of order\nsecond line")

    if env_id == "Broken-v0":
        gym.register(env_id, broken)
    with pytest.raises(SystemExit) as stop:
        ppo.parse_args(["--env-id", env_id])
    errors = capsys.readouterr().err
    gym.registry.pop("Broken-v0", None)
    assert (
        stop.value.code == 2 and says in errors and errors.startswith(f"error: --env-id {env_id}: ") and errors.count("\n") == 1
    )


# ----- the run ----------------------------------------------------------------------------------------------------------------
def test_first_minibatch_has_ratio_one(tmp_path, monkeypatch):
    seen, loss = [], ppo.ppo_loss

    def recording_loss(agent, mb, *rest):
        if len(seen) % 8 == 0:  # the first of an iteration: 4 minibatches, 2 epochs
            with torch.no_grad():
                mean, log_std, _ = agent(mb["obs"])
            seen.append((ppo.gaussian_log_prob(mb["actions"], mean, log_std) - mb["log_probs"]).exp())
        else:
            seen.append(torch.ones(1))
        return loss(agent, mb, *rest)

    monkeypatch.setattr(ppo, "ppo_loss", recording_loss)
    train(ppo, tmp_path, monkeypatch, *HOPPER, "--total-timesteps", 512)
    assert len(seen) == 32 and all((ratio - 1).abs().max() < 1e-5 for ratio in seen)


def test_evaluation_keeps_the_statistics_and_scores_what_training_scored(tmp_path, monkeypatch):
    arguments = ["--env-id", "Hopper-v5", "--total-timesteps", 20_000, "--num-steps", 512, "--num-minibatches", 8]
    run = train(ppo, tmp_path, monkeypatch, *arguments)
    before = (run / "checkpoint.pt").read_bytes()
    trained = [float(row["episodic_return"]) for row in rows(run / "episodes.csv")][-20:]
    updates = []
    monkeypatch.setattr(ppo.RunningNorm, "update", lambda self, batch: updates.append(batch))
    scores = ppo.evaluate(run, episodes=20, seed=3)
    assert not updates and (run / "checkpoint.pt").read_bytes() == before
    assert len(scores) == 20 and scores == ppo.evaluate(run, episodes=20, seed=3) != ppo.evaluate(run, episodes=20, seed=4)
    assert abs(np.mean(scores) - np.mean(trained)) < 2 * max(np.std(trained), np.std(scores))
    greedy = ppo.evaluate(run, episodes=2, seed=3, greedy=True)
    assert greedy == ppo.evaluate(run, episodes=2, seed=3, greedy=True) and greedy != scores[:2]
    forgotten = saved(run)  # the same weights without their statistics, as people who saved only those had them
    fresh = ppo.RunningNorm((11,)).get_extra_state()
    torch.save(forgotten | {"agent": forgotten["agent"] | {"obs_norm._extra_state": fresh}}, run / "checkpoint.pt")
    assert np.mean(ppo.evaluate(run, episodes=20, seed=3)) < np.mean(scores) - np.std(scores)


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
    size = ["--num-envs", 4, "--num-steps", 200, "--num-minibatches", 1, "--update-epochs", 1, "--total-timesteps", 1600]
    run = train(ppo, tmp_path, monkeypatch, "--env-id", "Pendulum-v1", "--norm-value-targets", "--no-norm-reward", *size)
    norm = ppo.ValueNorm()
    for (values, advantages), mb in zip(seen, batches, strict=True):
        returns = values + advantages  # in the environment's own units
        norm.update(returns)
        mean, std = norm.statistics()
        for name, raw in (("returns", returns), ("values", values)):
            torch.testing.assert_close(mb[name].sort()[0], ((raw - mean) / std).flatten().sort()[0], rtol=1e-4, atol=1e-4)
    assert batches[0]["returns"].mean().abs() < 1e-3 and (batches[0]["returns"].std() - 1).abs() < 0.01
    assert seen[1][0].mean() < -20  # values are back in the environment's units
    assert torch.equal(saved(run)["value_norm"]["moments"], norm.moments)


def test_schedules(tmp_path, monkeypatch):
    clips, loss = [], ppo.ppo_loss
    monkeypatch.setattr(ppo, "ppo_loss", lambda agent, mb, clip, args: clips.append(clip.item()) or loss(agent, mb, clip, args))
    size = ["--total-timesteps", 512, "--num-envs", 2, "--num-steps", 64, "--num-minibatches", 1, "--update-epochs", 1]
    run = train(ppo, tmp_path, monkeypatch, "--env-id", "Hopper-v5", *size, "--anneal-clip")
    rates = [float(row["learning_rate"]) for row in rows(run / "metrics.csv")]
    assert rates == pytest.approx([3e-4, 2.25e-4, 1.5e-4, 0.75e-4]) and clips == pytest.approx([0.2, 0.15, 0.1, 0.05])
    run = train(ppo, tmp_path, monkeypatch, "--env-id", "Hopper-v5", *size, "--no-anneal-lr")
    assert {row["learning_rate"] for row in rows(run / "metrics.csv")} == {"0.0003"} and clips[4:] == pytest.approx([0.2] * 4)


def test_target_kl_stops_the_epochs(tmp_path, monkeypatch):
    calls, loss = [], ppo.ppo_loss
    monkeypatch.setattr(ppo, "ppo_loss", lambda *inputs: calls.append(1) or loss(*inputs))
    size = [*HOPPER, "--total-timesteps", 128, "--learning-rate", 0.01]
    train(ppo, tmp_path, monkeypatch, *size)
    assert len(calls) == 8
    train(ppo, tmp_path, monkeypatch, *size, "--target-kl", 1e-6)
    assert len(calls) == 8 + 4


def test_compiled_loss_learns_the_same(tmp_path, monkeypatch):
    runs = [train(ppo, tmp_path, monkeypatch, *HOPPER, "--total-timesteps", 384, *flags) for flags in ([], ["--compile"])]
    one, other = (rows(run / "metrics.csv") for run in runs)
    for row, compiled in zip(one, other, strict=True):
        for name in row:
            assert float(compiled[name]) == pytest.approx(float(row[name]), rel=1e-2, abs=1e-4), name
