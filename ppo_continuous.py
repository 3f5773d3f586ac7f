"""PPO for continuous control: an agent learns to move a body, or anything else with real-valued actions, in one file.

    python ppo_continuous.py --env-id HalfCheetah-v5                                # the full run: 1M steps, some minutes
    python ppo_continuous.py --env-id InvertedPendulum-v5 --total-timesteps 30000   # a look, some ten seconds
    python ppo_continuous.py --resume runs/NAME                                     # go on where it stopped

The algorithm, in the names of the code below:

    for each iteration:
        play num_steps steps in num_envs environments with the present policy; store
            obs (normalised), action, reward (scaled), terminated, truncated   # a rollout, [T, N]
        log_probs, values = those of the whole rollout, in one batch
        advantages = compute_gae(...)          # how much better than expected was each action?
        returns = advantages + values          # what the value should have been
        for each of update_epochs passes, for each shuffled minibatch:
            ratio = pi_new(action | obs) / pi_old(action | obs)
            loss = clipped_policy_loss + vf_coef * clipped_value_loss - ent_coef * entropy
            one Adam step, gradient norm clipped

What to expect: README.md has the measured speed, scores and curves, each with its command.

Papers: PPO, Schulman et al. 2017, arXiv:1707.06347. GAE, Schulman et al. 2016, arXiv:1506.02438.
"Detail n" in a comment is number n of "The 37 Implementation Details of PPO", Huang et al., ICLR Blog Track 2022.
"""

import contextlib
import csv
import ctypes
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# ===== ARGUMENTS ==============================================================================================================
@dataclass
class Args:
    """PPO for continuous control. Defaults are those of Schulman et al. 2017 and openai/baselines unless a line says more."""

    # ----- the run ------------------------------------------------------------------------------------------------------------
    exp_name: str = re.sub(r"[^\w.-]", "-", Path(__file__).stem)  # name of the experiment, part of the run folder's name
    seed: int = 1  # seed of every random generator; the same seed gives the same run on the same machine
    torch_deterministic: bool = True  # ask cuDNN for deterministic algorithms (a CPU is deterministic anyway)
    device: str = "cpu"  # cpu, cuda, cuda:N, mps or auto (cuda, else mps, else cpu); networks this small want a CPU
    precision: Literal["auto", "fp32"] = "auto"  # float32 either way: a network this small gains nothing from bfloat16
    compile: bool = False  # compile the loss with torch.compile, for a minute at the start; never needed
    resume: str | None = None  # go on with this run (runs/NAME) in its folder; the arguments come from the run
    init_from: str | None = None  # start a new run from the parameters of this one (runs/NAME)
    checkpoint_interval: int = 100_000  # environment steps between checkpoints; a killed run replays these when resumed
    eval_episodes: int = 0  # full episodes to play with the trained agent at the end
    save_model: bool = False  # at the end also write the bare state_dict, {exp_name}.cleanrl_model
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works); else nothing touches the network
    wandb_project_name: str = "cleanRL"  # W&B project (CleanRL's default, so that runs stand beside older ones)
    wandb_entity: str | None = None  # W&B user or team; None is your own default

    # ----- the environment ----------------------------------------------------------------------------------------------------
    env_id: str = "HalfCheetah-v5"  # any Gymnasium id with real-valued (Box) actions; MODULE:ID imports MODULE first
    vector_mode: Literal["sync", "async"] = "sync"  # all environments in this process, or one worker process for each
    obs_norm: Literal["welford", "ema", "none"] = "welford"  # normalise by all observations so far (detail 28), or recent ones
    norm_reward: bool = True  # learn from scaled and clipped rewards (details 30, 31); the returns reported are always raw

    # ----- the algorithm ------------------------------------------------------------------------------------------------------
    total_timesteps: int = 1_000_000  # steps of all environments together, rounded up to whole rollouts
    learning_rate: float = 3e-4  # Adam's step size at the start
    anneal_lr: bool = True  # lower the learning rate linearly to 0 over the run (detail 4)
    num_envs: int = 1  # environments side by side (detail 1)
    num_steps: int = 2048  # steps of each environment in a rollout; num_envs * num_steps samples are learned from at a time
    gamma: float = 0.99  # discount of the reward, a step
    gae_lambda: float = 0.95  # from 0, trust the critic, to 1, trust the rewards (detail 5)
    num_minibatches: int = 32  # minibatches in a pass over the rollout; must divide num_envs * num_steps (detail 6)
    update_epochs: int = 10  # passes over a rollout; more learn faster and less stably, a smaller clip_coef may then help
    norm_adv: bool = True  # normalise the advantages of each minibatch (detail 7)
    clip_coef: float = 0.2  # clip range of the probability ratio (detail 8), and of the value with --clip-vloss
    anneal_clip: bool = False  # lower clip_coef linearly to 0 over the run
    clip_vloss: bool = True  # clip the value loss too (detail 9)
    ent_coef: float = 0.0  # weight of the entropy bonus (detail 10)
    vf_coef: float = 0.5  # weight of the value loss (detail 10)
    max_grad_norm: float = 0.5  # the gradient of all parameters together is cut to this norm (detail 11)
    target_kl: float | None = None  # leave out a rollout's remaining passes once the KL estimate is above this, say 0.02
    norm_value_targets: bool = False  # let the critic predict normalised returns; with --no-norm-reward


def check_args(args: Args) -> None:
    """Answers a bad argument in one clear line and with exit code 2, before anything is made."""
    check_run_args(args)
    check_numbers(args, "num_envs num_steps num_minibatches update_epochs checkpoint_interval", low=1)
    check_numbers(args, "learning_rate clip_coef max_grad_norm target_kl", above=0)
    check_numbers(args, "ent_coef vf_coef", low=0)
    check_numbers(args, "gamma gae_lambda", low=0, high=1)
    batch_size = args.num_envs * args.num_steps
    batch = f"num-envs * num-steps = {batch_size}"
    total, minibatches = args.total_timesteps, args.num_minibatches
    require(total >= batch_size, f"--total-timesteps {total}: must be at least one iteration, {batch} steps")
    require(batch_size % minibatches == 0, f"--num-minibatches {minibatches}: must divide {batch}")
    enough = batch_size > minibatches or not args.norm_adv
    require(enough, f"--num-minibatches {minibatches}: --norm-adv needs 2 samples in each, of {batch}")
    require(
        not (args.norm_reward and args.norm_value_targets), "--norm-value-targets: one scaling is enough, add --no-norm-reward"
    )
    try:
        env = gym.make(args.env_id, disable_env_checker=True)
    except Exception as error:  # whatever the environment's own code raises
        fail(f"--env-id {args.env_id}: cannot be made ({first_line(error)})")
    with contextlib.closing(env):
        obs_space, action_space = env.observation_space, env.action_space
    real = isinstance(action_space, gym.spaces.Box) and np.issubdtype(action_space.dtype, np.floating)
    require(real, f"--env-id {args.env_id}: has {action_space} actions; this script is for real-valued ones, Box")
    image = isinstance(obs_space, gym.spaces.Box) and len(obs_space.shape) > 1 and obs_space.dtype == np.uint8
    require(not image, f"--env-id {args.env_id}: shows images, {obs_space.shape}; this script is for vectors")
    flat = obs_space.is_np_flattenable
    require(flat, f"--env-id {args.env_id}: its observations, {obs_space}, cannot be flattened to a vector")


# ===== ENVIRONMENT ============================================================================================================
class WithoutInfo(gym.Wrapper):
    """Leaves the infos out: nothing here reads them, and to gather them is a sixth of a vector environment's step."""

    def reset(self, **kwargs) -> tuple[np.ndarray, dict]:
        return self.env.reset(**kwargs)[0], {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        return *self.env.step(action)[:4], {}


def make_envs(args: Args, num_envs: int) -> gym.vector.VectorEnv:
    """N environments: obs [N, D], flattened; `info["final_obs"][i]` [D] is the last of an episode that has just ended, when
    obs[i] is already the next one's first. Rewards are raw."""
    main = os.getpid()

    def make() -> gym.Env:
        if os.getpid() != main:  # Ctrl-C reaches the workers too, but it is for the main process to stop them
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        env = gym.make(args.env_id, disable_env_checker=True)
        is_vector = isinstance(env.observation_space, gym.spaces.Box) and len(env.observation_space.shape) == 1
        return WithoutInfo(env if is_vector else gym.wrappers.FlattenObservation(env))

    vector = gym.vector.SyncVectorEnv if args.vector_mode == "sync" else gym.vector.AsyncVectorEnv
    return vector([make] * num_envs, copy=False, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)  # NEXT_STEP ignores actions


# ===== NETWORK ================================================================================================================
def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights and zero biases (detail 2)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class RunningNorm(nn.Module):
    """Running mean and variance, [D] or scalars, of all that `update` was given; normalises and clips to +-10 (detail 29).

    With `momentum` the past fades: a moving average, bias-corrected as Adam's are. It works in NumPy, on what the environments
    give, but it is a part of its module's state_dict: whoever saves the weights saves the statistics with them.
    """

    def __init__(self, shape: tuple[int, ...], momentum: float | None = None) -> None:
        super().__init__()
        self.momentum, self.count = momentum, np.zeros(())  # of samples; with `momentum` of updates
        self.mean, self.var = np.zeros(shape), np.ones(shape)

    def update(self, batch: np.ndarray) -> None:
        """Adds N samples, [N, *shape]. Chan et al. 1979, equation 2.1; `rate` is the weight of the batch beside the past's."""
        mean, var, count = self.mean, self.var, self.count
        count += 1 if self.momentum else len(batch)
        rate = (1 - self.momentum) / (1 - self.momentum**count) if self.momentum else len(batch) / count
        batch_mean = np.add.reduce(batch) / len(batch)  # half the time of batch.mean(0)
        batch_var = np.add.reduce((batch - batch_mean) ** 2) / len(batch)
        delta = batch_mean - mean
        mean += rate * delta
        var += rate * (batch_var - var + (1 - rate) * delta**2)

    def forward(self, batch: np.ndarray) -> np.ndarray:
        return ((batch - self.mean) / self.std()).clip(-10, 10)

    def std(self) -> np.ndarray:
        return np.sqrt(self.var + 1e-8)

    def get_extra_state(self) -> dict:
        return {name: torch.tensor(getattr(self, name)) for name in ("count", "mean", "var")}

    def set_extra_state(self, state: dict) -> None:
        for name, tensor in state.items():
            if tensor.shape != getattr(self, name).shape:
                raise ValueError(f"the {name} of {tensor.shape} numbers, not {getattr(self, name).shape}")
            getattr(self, name)[...] = tensor.numpy()


class Agent(nn.Module):
    """Two networks of the same form, policy and value (detail 13), and the statistics that normalise what they see."""

    def __init__(self, obs_dim: int, action_dim: int, obs_norm: str) -> None:
        super().__init__()
        self.obs_norm = {"welford": RunningNorm((obs_dim,)), "ema": RunningNorm((obs_dim,), 0.999)}.get(obs_norm)
        self.critic = self._mlp(obs_dim, 1, std=1.0)
        self.actor_mean = self._mlp(obs_dim, action_dim, std=0.01)  # close to 0 at first
        self.actor_logstd = nn.Parameter(torch.zeros(1, action_dim))  # independent of the observation (detail 24)

    def _mlp(self, inputs: int, outputs: int, std: float) -> nn.Sequential:
        """64-64 and tanh (detail 26)."""
        hidden = layer_init(nn.Linear(inputs, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()
        return nn.Sequential(*hidden, layer_init(nn.Linear(64, outputs), std))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised obs [B, D] -> mean [B, A] and log standard deviation [1, A] of the policy, value [B]."""
        return self.actor_mean(obs), self.actor_logstd, self.critic(obs).squeeze(-1)

    def normalise(self, obs: np.ndarray) -> np.ndarray:
        """Raw obs [N, D] as the networks want them."""
        return (self.obs_norm(obs) if self.obs_norm else obs).astype(np.float32)


# ===== FORMULAS ===============================================================================================================
def policy_mean(weights: list[np.ndarray], obs: np.ndarray) -> np.ndarray:
    """`agent.actor_mean` [N, A] in NumPy, for the rollout: on a single observation PyTorch takes three times as long."""
    w1, b1, w2, b2, w3, b3 = weights
    return np.tanh(np.tanh(obs @ w1.T + b1) @ w2.T + b2) @ w3.T + b3


def gaussian_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log pi(a|s) [B] of actions [B, A] under independent normal distributions (details 23, 25): their sum over A."""
    return -0.5 * (((actions - mean) / log_std.exp()) ** 2 + 2 * log_std + math.log(2 * math.pi)).sum(-1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """H [B] of independent normal distributions with log_std [B, A]: the sum of 0.5 * log(2 * pi * e) + log_std."""
    return (0.5 * math.log(2 * math.pi * math.e) + log_std).sum(-1)


def discounted_sums(rewards: np.ndarray, done: np.ndarray, before: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """G_t = r_t + gamma * (1 - done_{t-1}) * G_{t-1} [T, N], by whose spread rewards are scaled (detail 30).

    They look back over the episode where a return looks ahead, so that they are known at once. `before` [N] is what the last
    call gave as its second result: where the episodes stand that are not over.
    """
    sums = np.zeros_like(rewards)
    for t in range(len(rewards)):
        sums[t] = rewards[t] + gamma * before
        before = sums[t] * ~done[t]
    return sums, before


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Generalised advantage estimation (detail 5), arXiv:1506.02438, equation 16, as a recursion. All [T, N].

        delta_t = r_t + gamma * (1 - terminated_t) * V(s'_t) - V(s_t)
        A_t     = delta_t + gamma * lambda * (1 - done_t) * A_{t+1}

    `next_values` is V of the true successor s'_t, the final observation where an episode ended. A time limit (truncation) is
    `done` but not `terminated`: the sum over the future stops there, its estimate V(s'_t) does not.
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    decays = gamma * gae_lambda * (~done).to(rewards.dtype)
    advantages = torch.zeros_like(rewards)
    advantage = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        advantage = deltas[t] + decays[t] * advantage
        advantages[t] = advantage
    return advantages


def clipped_policy_loss(log_ratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> Tensor:
    """-E[min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A)], arXiv:1707.06347, equation 7 (detail 8). Inputs [B]."""
    ratio = log_ratio.exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | Tensor | None) -> Tensor:
    """0.5 * E[max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2)] (detail 9); None does not clip. Inputs [B]."""
    losses = (values - returns) ** 2
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        losses = torch.max(losses, (clipped - returns) ** 2)
    return 0.5 * losses.mean()


LOSS_NAMES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def ppo_loss(agent: Agent, mb: dict[str, Tensor], clip_coef: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """The loss of one minibatch (arXiv:1707.06347, equation 9; detail 10) and the numbers of LOSS_NAMES, [6] (detail 12).

    `mb` holds obs [M, D], actions [M, A] and log_probs, values, advantages, returns, each [M].
    """
    mean, log_std, values = agent(mb["obs"])
    log_ratio = gaussian_log_prob(mb["actions"], mean, log_std) - mb["log_probs"]
    advantages = mb["advantages"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    policy_loss = clipped_policy_loss(log_ratio, advantages, clip_coef)
    value_loss = clipped_value_loss(values, mb["values"], mb["returns"], clip_coef if args.clip_vloss else None)
    entropy = gaussian_entropy(log_std).mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy

    with torch.no_grad():  # two estimates of KL(old || new), http://joschu.net/blog/kl-approx.html
        ratio = log_ratio.exp()
        k1, k3 = (-log_ratio).mean(), (ratio - 1 - log_ratio).mean()
        clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
        metrics = torch.stack([policy_loss, value_loss, entropy, k1, k3, clipfrac])
    return loss, metrics


class ValueNorm(nn.Module):
    """Running mean and standard deviation of the returns, for a critic that predicts (return - mean) / std.

    Moving averages over iterations, bias-corrected as Adam's are; 0 and 1 until the first update. As van Hasselt et al. 2016,
    arXiv:1602.07714, rescale targets, without the step of theirs that then corrects the output layer.
    """

    def __init__(self, momentum: float = 0.99) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("moments", torch.zeros(3))  # moving averages of 1, R and R^2

    def update(self, returns: Tensor) -> None:
        moments = torch.stack([torch.ones_like(returns), returns, returns**2]).mean((1, 2))
        self.moments.lerp_(moments, 1 - self.momentum)

    def statistics(self) -> tuple[Tensor, Tensor]:
        if self.moments[0] == 0:
            return self.moments.new_zeros(()), self.moments.new_ones(())
        mean, square = self.moments[1:] / self.moments[0]
        return mean, (square - mean**2).clamp(min=1e-8).sqrt()


def flatten_parameters(module: nn.Module) -> nn.Parameter:
    """Moves the parameters, and their gradients, into one vector, of which they become views.

    To clip and to step one vector takes a fifth of the time of thirteen small tensors, and is the same arithmetic.
    """
    flat = nn.Parameter(nn.utils.parameters_to_vector(module.parameters()).detach())
    flat.grad = torch.zeros_like(flat)
    offset = 0
    for parameter in module.parameters():
        part = slice(offset, offset + parameter.numel())
        parameter.data, parameter.grad = flat.data[part].view_as(parameter), flat.grad[part].view_as(parameter)
        offset = part.stop
    return flat


# ===== TRAINING ===============================================================================================================
def train(args: Args) -> Path:
    """Trains as `args` say and returns the run folder."""
    check_args(args)
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    device = choose_device(args.device)
    keep_freed_memory()
    seed_everything(args.seed, args.torch_deterministic)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more only slow a network this small down

    envs = ResumableVectorEnv(make_envs(args, args.num_envs), args.seed, args.checkpoint_interval)
    obs_dim, action_dim = envs.envs.single_observation_space.shape[0], math.prod(envs.envs.single_action_space.shape)
    low, high = envs.envs.single_action_space.low, envs.envs.single_action_space.high
    agent, value_norm = Agent(obs_dim, action_dim, args.obs_norm).to(device), ValueNorm().to(device)
    reward_norm = RunningNorm(())
    learned = {"agent": agent, "value_norm": value_norm, "reward_norm": reward_norm}
    if args.init_from and not checkpoint:
        load_state(learned, load_checkpoint(args.init_from), args.init_from)
    parameters = flatten_parameters(agent)
    optimizer = torch.optim.Adam([parameters], lr=args.learning_rate, eps=1e-5, fused=True)  # detail 3
    loss_function = torch.compile(ppo_loss) if args.compile else ppo_loss

    batch_size = args.num_envs * args.num_steps
    num_iterations = math.ceil(args.total_timesteps / batch_size)
    first_iteration, global_step = 1, 0
    parts = learned | {"optimizer": optimizer}  # what a checkpoint keeps of the algorithm
    if checkpoint:
        load_state(parts, checkpoint, args.resume)
        first_iteration, global_step = checkpoint["iteration"] + 1, checkpoint["global_step"]
        set_rng_state(checkpoint["rng"])

    def snapshot(iteration: int) -> dict:
        counters = {"iteration": iteration, "global_step": global_step, "envs": envs.state_dict(), "rng": rng_state()}
        counters["discounted"] = discounted.tolist()
        return {name: part.state_dict() for name, part in parts.items()} | counters

    # The rollout: T steps of N environments, in NumPy as the environments are.
    shape = (args.num_steps, args.num_envs)
    obs = np.zeros((*shape, obs_dim), dtype=np.float32)  # [T, N, D]
    actions = np.zeros((*shape, action_dim), dtype=np.float32)  # [T, N, A]
    rewards, final_values = np.zeros(shape), np.zeros(shape, dtype=np.float32)  # [T, N]
    terminateds, truncateds = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)  # [T, N]
    discounted = np.array(checkpoint["discounted"] if checkpoint else [0.0] * args.num_envs)  # [N], of discounted_sums

    about = f"obs {obs_dim}, actions {action_dim}, environments {args.num_envs}"
    about += f"; {num_iterations:,} iterations of {batch_size:,} steps"
    with contextlib.closing(envs), Run(args, checkpoint, num_iterations * batch_size, device, False, about) as run:
        next_obs, _ = envs.load_state_dict(checkpoint["envs"]) if checkpoint else envs.reset()
        run.save(snapshot(first_iteration - 1))
        for iteration in range(first_iteration, num_iterations + 1):
            remaining = 1 - (iteration - 1) / num_iterations  # from 1 at the start towards 0
            learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1)  # detail 4
            clip_coef = torch.tensor(args.clip_coef * (remaining if args.anneal_clip else 1), device=device)
            optimizer.param_groups[0]["lr"] = learning_rate

            # ----- COLLECT A ROLLOUT
            with torch.no_grad():
                value_mean, value_std = value_norm.statistics()
                weights = [parameter.cpu().numpy() for parameter in agent.actor_mean.parameters()]
                std, noise = agent.actor_logstd.exp().cpu().numpy(), torch.randn(actions.shape).numpy()
                for t in range(args.num_steps):
                    if agent.obs_norm:
                        agent.obs_norm.update(next_obs)
                    obs[t] = agent.normalise(next_obs)
                    actions[t] = policy_mean(weights, obs[t]) + std * noise[t]  # detail 23
                    playable = actions[t].reshape(-1, *low.shape).clip(low, high)  # `actions` stay unclipped (detail 27)
                    next_obs, reward, terminated, truncated, info = envs.step(playable)
                    global_step += args.num_envs
                    run.log_step(global_step, reward, terminated | truncated)
                    rewards[t], terminateds[t], truncateds[t] = reward, terminated, truncated
                    if truncated.any():  # a time limit: the true successor is not the next episode's first observation
                        final_obs = agent.normalise(np.stack(info["final_obs"][truncated]))  # [K, D]
                        value = agent.critic(torch.from_numpy(final_obs).to(device)).squeeze(-1)
                        final_values[t, truncated] = (value * value_std + value_mean).cpu()
                # What only the update needs is computed for the whole rollout at once.
                arrays = {"obs": obs, "actions": actions, "final_values": final_values}
                arrays |= {"terminated": terminateds, "truncated": truncateds}
                rollout = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}  # [T, N, ...]
                mean, log_std, values = agent(rollout["obs"])
                log_probs = gaussian_log_prob(rollout["actions"], mean, log_std)
                values = values * value_std + value_mean
                last_value = agent.critic(torch.from_numpy(agent.normalise(next_obs)).to(device)).squeeze(-1)
                last_value = last_value * value_std + value_mean

            # ----- SCALE THE REWARDS
            scaled_rewards = rewards
            if args.norm_reward:  # details 30 and 31; by the spread alone, as to move the mean would change what is best
                sums, discounted = discounted_sums(rewards, terminateds | truncateds, discounted, args.gamma)
                reward_norm.update(sums.ravel())
                scaled_rewards = (rewards / reward_norm.std()).clip(-10, 10)

            # ----- ESTIMATE THE ADVANTAGES
            learner_rewards = torch.from_numpy(scaled_rewards.astype(np.float32)).to(device)
            terminations, done = rollout["terminated"], rollout["terminated"] | rollout["truncated"]
            next_values = torch.cat([values[1:], last_value.unsqueeze(0)])
            next_values = torch.where(rollout["truncated"], rollout["final_values"], next_values)
            advantages = compute_gae(learner_rewards, values, next_values, terminations, done, args.gamma, args.gae_lambda)
            returns = advantages + values
            if args.norm_value_targets:
                value_norm.update(returns)
            value_mean, value_std = value_norm.statistics()  # the same for targets and old values

            # ----- UPDATE THE NETWORK
            batch = {"obs": rollout["obs"], "actions": rollout["actions"], "log_probs": log_probs, "advantages": advantages}
            batch |= {"values": (values - value_mean) / value_std, "returns": (returns - value_mean) / value_std}
            batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}  # [T, N, ...] -> [B, ...]
            metrics = []
            for _ in range(args.update_epochs):
                for mb_indices in torch.randperm(batch_size).to(device).chunk(args.num_minibatches):
                    mb = {name: tensor[mb_indices] for name, tensor in batch.items()}
                    loss, mb_metrics = loss_function(agent, mb, clip_coef, args)
                    parameters.grad.zero_()
                    loss.backward()
                    parameters.grad *= (args.max_grad_norm / (parameters.grad.norm() + 1e-6)).clamp(max=1.0)  # detail 11
                    optimizer.step()
                    metrics.append(mb_metrics)
                if args.target_kl is not None and mb_metrics[LOSS_NAMES.index("approx_kl")] > args.target_kl:
                    break

            # ----- LOG AND SAVE
            losses = dict(zip(LOSS_NAMES, torch.stack(metrics).mean(0).tolist(), strict=True))
            losses["explained_variance"] = (1 - (returns - values).var() / returns.var()).item()
            run.log(global_step, {"charts/learning_rate": learning_rate} | {f"losses/{k}": v for k, v in losses.items()})
            stopped = run.stopped  # read once: a signal may come between the next two lines
            if stopped or run.wants_checkpoint(global_step) or iteration == num_iterations:
                run.save(snapshot(iteration))
            if stopped:
                break
        run.finish(agent, evaluate)
    return run.folder


# ===== EVALUATION =============================================================================================================
@torch.no_grad()
def evaluate(folder: str | Path, episodes: int = 10, seed: int = 0, greedy: bool = False, device: str = "cpu") -> list[float]:
    """Plays full episodes with a run's agent in the environments it was trained in; returns the raw return of each.

    Actions are sampled as in training, or are the most probable ones where `greedy`. The statistics that normalise the
    observations are the run's and stay as they are. Each environment plays a share of the episodes that is settled
    beforehand: to take the first to finish would favour short episodes.
    """
    require(episodes >= 1, f"episodes {episodes}: must be 1 or more")
    checkpoint, target = load_checkpoint(folder), choose_device(device)
    args = Args(**checkpoint["args"])
    num_envs = min(episodes, args.num_envs)
    envs = make_envs(args, num_envs)
    low, high = envs.single_action_space.low, envs.single_action_space.high
    agent = Agent(envs.single_observation_space.shape[0], math.prod(low.shape), args.obs_norm).to(target)
    load_state({"agent": agent}, checkpoint, folder)
    generator = torch.Generator().manual_seed(seed)

    share = [len(range(i, episodes, num_envs)) for i in range(num_envs)]
    scores, episode_return = [[] for _ in share], np.zeros(num_envs)
    with contextlib.closing(envs):
        obs, _ = envs.reset(seed=(np.random.SeedSequence(seed).generate_state(num_envs) >> 1).tolist())
        while any(len(finished) < number for finished, number in zip(scores, share, strict=True)):
            mean, log_std, _ = agent(torch.from_numpy(agent.normalise(obs)).to(target))
            noise = torch.randn(mean.shape, generator=generator).to(target)
            action = mean if greedy else mean + log_std.exp() * noise
            obs, reward, terminated, truncated, _ = envs.step(action.cpu().numpy().reshape(-1, *low.shape).clip(low, high))
            episode_return += reward
            for i in np.flatnonzero(terminated | truncated):
                scores[i].append(float(episode_return[i]))
                episode_return[i] = 0
    return [score for finished, number in zip(scores, share, strict=True) for score in finished[:number]]


# ==============================================================================================================================
# RUN KEEPING: from here to the end nothing depends on the algorithm; the same block, letter for letter, in all scripts
# ==============================================================================================================================
RESUME_MAY_CHANGE = ["device", "eval_episodes", "resume", "save_model", "track", "wandb_entity", "wandb_project_name"]


def fail(message: str) -> NoReturn:
    """Ends the program with one line on stderr and exit code 2, as any wrong command line does."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def require(condition: bool, message: str) -> None:
    if not condition:
        fail(message)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:100]}".splitlines()[0]


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args; with --resume the run's own arguments are the defaults."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    folder = parser.parse_known_args(argv)[0].resume
    default = Args() if folder is None else Args(**load_checkpoint(folder)["args"])
    args = tyro.cli(Args, args=argv, default=default)
    check_args(args)
    return args


def check_numbers(args: Args, names: str, low: float = -math.inf, above: float = -math.inf, high: float = math.inf) -> None:
    """low <= value <= high and value > above, for each of the named arguments that is not None."""
    for name, value in ((name, getattr(args, name)) for name in names.split()):
        bounds = [f"at least {low}"] * (low > -math.inf) + [f"above {above}"] * (above > -math.inf)
        bounds += [f"at most {high}"] * (high < math.inf)
        valid = value is None or (math.isfinite(value) and low <= value <= high and value > above)
        require(valid, f"--{name.replace('_', '-')} {value}: must be a finite number, {' and '.join(bounds)}")


def check_run_args(args: Args) -> None:
    """The checks that all scripts share."""
    check_numbers(args, "seed", low=0, high=2**32 - 1)
    check_numbers(args, "eval_episodes", low=0)
    choose_device(args.device)
    named = re.fullmatch(r"[\w.-]{1,100}", args.exp_name) is not None
    require(named, f"--exp-name {args.exp_name!r}: must be 1 to 100 letters, digits, . _ or -")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    require(compiler is not None or not args.compile, "--compile: needs a C++ compiler, g++ or clang++; it can be left out")
    if args.resume is None:
        if args.init_from is not None:
            load_checkpoint(args.init_from)
        return
    for name, before in load_checkpoint(args.resume)["args"].items():
        flag, now = f"--{name.replace('_', '-')}", getattr(args, name)
        if name == "total_timesteps":
            require(now >= before, f"{flag} {now}: a resumed run can only grow, and this one has {before}")
        elif name not in RESUME_MAY_CHANGE:
            require(now == before, f"{flag} {now}: the run was started with {before}, and a resume cannot change it")


def choose_device(name: str) -> torch.device:
    """auto, cpu, cuda, cuda:N or mps, as a device that works here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    known = re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", name) is not None
    require(known, f"--device {name}: must be auto, cpu, cuda, cuda:N or mps")
    try:
        return torch.zeros(1, device=name).device
    except (AssertionError, RuntimeError) as error:
        fail(f"--device {name}: does not work here, try auto or cpu ({first_line(error)})")


def choose_bf16(precision: str, device: torch.device) -> bool:
    """Whether to compute in bfloat16; auto: where the hardware multiplies it itself, for emulation is slower than float32."""
    if precision == "auto" and device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "auto" and device.type == "cpu":
        capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    return precision == "bf16"


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory for the next batch; it would give large blocks back and fault them in again."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large block
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap


def seed_everything(seed: int, deterministic: bool) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, not deterministic


def rng_state() -> dict:
    """The state of every global random generator, as tensors and plain values."""
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    state["cuda"] = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    state["mps"] = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    return state


def set_rng_state(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if torch.backends.mps.is_available() and state["mps"] is not None:
        torch.mps.set_rng_state(state["mps"])


class ResumableVectorEnv:
    """A vector environment that can be put back where it was, although it gives no snapshot of itself.

    An episode is its seed and its actions: this remembers the seed of each environment's last seeded reset and the actions
    since; restoring resets with those seeds and plays those actions again. To keep the log short, the first end of an episode
    after each multiple of `interval` steps is followed by a seeded reset, whether or not the run is ever interrupted.
    The environment needs SAME_STEP autoreset; where info has "game_over" [N], that is the end of an episode.
    """

    def __init__(self, envs: gym.vector.VectorEnv, seed: int, interval: int) -> None:
        self.envs, self.seed, self.interval = envs, seed, interval
        self.steps = 0  # of all environments together
        self.actions = []  # one [N, ...] a step, the oldest first
        self.start = np.zeros(envs.num_envs, dtype=np.int64)  # where in `actions` each environment's seeded reset lies
        self.segment = np.zeros(envs.num_envs, dtype=np.int64)  # steps // interval at that reset, which gives its seed

    def reset(self) -> tuple[np.ndarray, dict]:
        return self._seeded_reset(np.ones(self.envs.num_envs, dtype=bool))

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        action = action.astype(self.envs.single_action_space.dtype)  # as it will be when it is played again
        obs, reward, terminated, truncated, info = self.envs.step(action)
        self.actions.append(action)
        self.steps += self.envs.num_envs
        due = info.get("game_over", terminated | truncated) & (self.segment < self.steps // self.interval)
        if due.any():
            self.segment[due], self.start[due] = self.steps // self.interval, len(self.actions)
            del self.actions[: self.start.min()]
            self.start -= self.start.min()
            obs, reset_info = self._seeded_reset(due)
            for key, value in reset_info.items():
                if isinstance(value, np.ndarray) and key in info:
                    info[key][due] = value[due]
        return obs, reward, terminated, truncated, info

    def _seeded_reset(self, mask: np.ndarray) -> tuple[np.ndarray, dict]:
        """Resets the environments of mask [N] with their seeds and leaves the others where they are."""
        keys = ((self.seed, i, int(segment)) for i, segment in enumerate(self.segment))
        seeds = np.array([np.random.SeedSequence(key).generate_state(1)[0] >> 1 for key in keys], dtype=np.int64)
        options = {} if mask.all() else {"options": {"reset_mask": mask}}
        of_gymnasium = isinstance(self.envs.unwrapped, (gym.vector.SyncVectorEnv, gym.vector.AsyncVectorEnv))
        return self.envs.reset(seed=seeds.tolist() if of_gymnasium else seeds[mask], **options)

    def state_dict(self) -> dict:
        actions = np.array(self.actions).reshape(len(self.actions), *self.envs.action_space.shape)
        if actions.size and actions.dtype.kind == "i":
            actions = actions.astype(np.min_scalar_type(int(actions.max())))  # a byte a step
        arrays = {"actions": actions, "start": self.start.copy(), "segment": self.segment.copy()}
        return {"steps": self.steps} | {name: torch.from_numpy(array) for name, array in arrays.items()}

    def load_state_dict(self, state: dict) -> tuple[np.ndarray, dict]:
        """Puts the environments back; returns their present observations and info."""
        self.steps, self.start, self.segment = state["steps"], state["start"].numpy().copy(), state["segment"].numpy().copy()
        self.actions = list(state["actions"].numpy().astype(self.envs.single_action_space.dtype))
        obs, info = self.reset()
        for t, action in enumerate(self.actions, start=1):
            obs, _, _, _, info = self.envs.step(action)
            if (self.start == t).any():  # a shorter log begins here; what came before was only to pass the time
                obs, info = self._seeded_reset(self.start == t)
        return obs, info

    def close(self) -> None:
        self.envs.close()


def load_checkpoint(folder: str | Path) -> dict:
    """Reads a run's checkpoint: tensors and plain values only, so no file can bring code with it."""
    path = Path(folder) / "checkpoint.pt"
    require(path.is_file(), f"{folder}: not a run folder (there is no checkpoint.pt in it)")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        fail(f"{path}: damaged, or no checkpoint ({first_line(error)})")
    names = {field.name for field in dataclasses.fields(Args)}
    known = isinstance(checkpoint, dict) and isinstance(checkpoint.get("args"), dict) and checkpoint["args"].keys() == names
    require(known, f"{path}: not written by this script, or by another version of it")
    return checkpoint


def load_state(parts: dict, checkpoint: dict, folder: str | Path) -> None:
    """Fills each of the named networks, optimisers or statistics from a checkpoint."""
    try:
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
    except (KeyError, RuntimeError, ValueError) as error:
        fail(f"{folder}: does not fit this environment or network ({first_line(error)})")


class Run:
    """A run's folder (CSVs, TensorBoard, W&B, checkpoint) and progress line; Ctrl-C or SIGTERM sets `stopped`."""

    def __init__(
        self, args: Args, checkpoint: dict | None, total_steps: int, device: torch.device, bf16: bool, about: str
    ) -> None:
        kept = checkpoint["run"] if checkpoint else {"seconds": 0.0, "sizes": {}, "episodes": [], "playing": [], "commands": []}
        self.args, self.total_steps, self.stopped = args, total_steps, None
        self.step = self.saved_step = checkpoint["global_step"] if checkpoint else 0
        self.episodes = deque(kept["episodes"], maxlen=100)  # (return, length) of the last 100 finished
        self.playing = np.array(kept["playing"] or np.zeros((2, args.num_envs)))  # return and length so far of the unfinished
        self.commands = [*kept["commands"], shlex.join(sys.argv)]
        try:
            self.folder = Path(args.resume) if args.resume else self._new_folder()
            for name, size in kept["sizes"].items():  # cut off what was written after the checkpoint: it will come again
                path = self.folder / name
                require(path.stat().st_size >= size, f"{path}: is shorter than at the last checkpoint")
                os.truncate(path, size)
            self._write_config(device, bf16)
            self.csvs = {name: (self.folder / name).open("a", newline="") for name in ("episodes.csv", "metrics.csv")}
        except OSError as error:
            fail(f"{error.filename}: cannot be written ({error.strerror})")
        if args.track:
            import wandb

            id = self.folder.resolve().name  # the same when resumed, so that W&B continues the same run
            names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": id, "id": id}
            wandb.init(**names, resume="allow", dir=self.folder, config=vars(args), sync_tensorboard=True, save_code=True)
        self.writer = SummaryWriter(self.folder, purge_step=self.step + 1)  # what was logged after the checkpoint is ignored
        if not checkpoint:
            self._write_row("episodes.csv", ("global_step", "episodic_return", "episodic_length", "seconds"))
            rows = "".join(f"|{key}|{value}|\n" for key, value in vars(args).items())
            self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        print(f"{args.env_id}: {about}")
        print(f"{device}, {torch.get_num_threads()} threads, {'bf16' if bf16 else 'fp32'}; {self.folder}", flush=True)
        if checkpoint:
            before, now = checkpoint["args"]["total_timesteps"], args.total_timesteps
            stretched = f"; total-timesteps grows from {before:,} to {now:,}: the schedules stretch" if now > before else ""
            print(f"resuming at step {self.step:,}{stretched}; the games are played again to where they were", flush=True)
        self.start = time.perf_counter() - kept["seconds"]
        self.printed = time.perf_counter()
        self.window = deque(maxlen=20)  # (time, step) of the last rows, for steps per second
        layout = "{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        self.bar = tqdm(total=total_steps, initial=self.step, bar_format=layout, disable=not sys.stderr.isatty())

    def _new_folder(self) -> Path:
        name = f"{self.args.env_id}__{self.args.exp_name}__{self.args.seed}__{int(time.time())}"
        folder = base = Path("runs") / re.sub("[/:]", "-", name)
        for number in itertools.count(2):
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                if not base.is_dir():
                    raise
                folder = Path(f"{base}-{number}")  # another run of the same second

    def _write_config(self, device: torch.device, bf16: bool) -> None:
        try:
            git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
            commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip() or None
        except (OSError, subprocess.SubprocessError):
            commit = None
        packages = {package.name.replace("_", "-"): package.version for package in importlib.metadata.distributions()}
        config = {"args": vars(self.args), "commands": self.commands, "git_commit": commit}
        config |= {"device": str(device), "precision": "bf16" if bf16 else "fp32", "threads": torch.get_num_threads()}
        config |= {"python": platform.python_version(), "machine": platform.platform()}
        config |= {name: packages.get(name) for name in ("torch", "numpy", "gymnasium", "ale-py", "mujoco")}
        (self.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _write_row(self, name: str, row: Iterable) -> None:
        csv.writer(self.csvs[name]).writerow(row)
        self.csvs[name].flush()

    def __enter__(self) -> "Run":
        self.handlers = {}
        with contextlib.suppress(ValueError):  # only the main thread may
            self.handlers = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _stop(self, number: int, _frame) -> None:
        self.stopped = number
        signal.signal(number, signal.SIG_DFL)  # a second one ends the program at once
        os.write(2, b"\nstopping after this iteration (once more stops at once)\n")

    def __exit__(self, *_) -> None:
        self._restore_handlers()
        self.bar.close()
        self.writer.close()
        for file in self.csvs.values():
            file.close()
        if self.args.track:
            import wandb

            wandb.finish()

    def _restore_handlers(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def log_step(self, global_step: int, reward: np.ndarray, episode_over: np.ndarray) -> None:
        """Adds up the environments' own rewards [N]; an episode that is over [N] becomes a row of episodes.csv."""
        if not self.window:  # from here, not from __init__: to resume takes time but no steps
            self.window.append((time.perf_counter(), self.step))
        self.playing[0] += reward
        self.playing[1] += 1
        for i in np.flatnonzero(episode_over):
            episodic_return, episodic_length = self.playing[:, i].tolist()
            self.playing[:, i] = 0
            self.episodes.append((episodic_return, episodic_length))
            seconds = f"{time.perf_counter() - self.start:.1f}"
            self._write_row("episodes.csv", (global_step, f"{episodic_return:.10g}", int(episodic_length), seconds))
            self.writer.add_scalar("charts/episodic_return", episodic_return, global_step)
            self.writer.add_scalar("charts/episodic_length", episodic_length, global_step)

    def log(self, global_step: int, scalars: dict[str, float]) -> None:
        """One row of metrics.csv, the same for TensorBoard, and the progress line."""
        now = time.perf_counter()
        sps = (global_step - self.window[0][1]) / (now - self.window[0][0])  # over the last 20 rows
        self.window.append((now, global_step))
        if self.csvs["metrics.csv"].tell() == 0:
            self._write_row("metrics.csv", ("global_step", "seconds", "sps", *(name.split("/")[-1] for name in scalars)))
        numbers = (f"{value:.7g}" for value in scalars.values())
        self._write_row("metrics.csv", (global_step, f"{now - self.start:.1f}", f"{sps:.0f}", *numbers))
        status = f"{sps:,.0f} steps/s"
        if self.episodes:
            mean_return, mean_length = np.mean(self.episodes, axis=0)
            scalars = scalars | {"charts/mean_return_100": mean_return}
            status += f", last {len(self.episodes)} episodes: return {mean_return:.1f}, length {mean_length:.0f}"
        for name, value in ({"charts/SPS": sps} | scalars).items():
            self.writer.add_scalar(name, value, global_step)
        self.bar.set_postfix_str(status, refresh=False)
        self.bar.update(global_step - self.step)
        self.step = global_step
        if self.bar.disable and (now - self.printed > 10 or global_step == self.total_steps):  # no terminal: a line at times
            share, left = global_step / self.total_steps, timedelta(seconds=round((self.total_steps - global_step) / sps))
            print(f"{global_step:,}/{self.total_steps:,} ({share:.0%}), {left} left, {status}", flush=True)
            self.printed = now

    def wants_checkpoint(self, global_step: int) -> bool:
        interval = self.args.checkpoint_interval
        return global_step // interval > self.saved_step // interval

    def save(self, state: dict) -> None:
        """Writes the checkpoint beside the old one, then moves it into its place: a kill leaves one of the two, whole."""
        self.writer.flush()
        for file in self.csvs.values():
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self.csvs.items()}
        kept = {"seconds": time.perf_counter() - self.start, "sizes": sizes, "commands": self.commands}
        state |= {"run": kept | {"episodes": list(self.episodes), "playing": self.playing.tolist()}}
        state |= {"args": vars(self.args) | {"resume": None}}
        path = self.folder / "checkpoint.pt"
        with open(path.with_suffix(".tmp"), "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".tmp"), path)
        self.saved_step = state["global_step"]

    def finish(self, agent: nn.Module, evaluate: Callable[..., list[float]]) -> None:
        """Ends a stopped run with exit code 128 + the signal; else writes the bare model and evaluates, where asked to."""
        self.bar.close()
        if self.stopped:
            command = shlex.join(["python", sys.argv[0], "--resume", str(self.folder)])
            print(f"stopped and saved at step {self.saved_step:,}; to go on: {command}")
            raise SystemExit(128 + self.stopped)
        if self.args.save_model:
            torch.save(agent.state_dict(), self.folder / f"{self.args.exp_name}.cleanrl_model")
        if self.args.eval_episodes:
            self.writer.flush()
            self._restore_handlers()  # from here on Ctrl-C has nothing left to save
            try:
                scores = evaluate(self.folder, self.args.eval_episodes, device=self.args.device)
            except KeyboardInterrupt:
                print(f"evaluation stopped; the run is whole: {self.folder}")
                raise SystemExit(128 + signal.SIGINT) from None
            for i, score in enumerate(scores):
                self.writer.add_scalar("eval/episodic_return", score, i)
            print(f"evaluation: {len(scores)} episodes, mean {np.mean(scores):.1f}, standard deviation {np.std(scores):.1f}")
        print(f"done: {self.folder}")


if __name__ == "__main__":
    train(parse_args())
