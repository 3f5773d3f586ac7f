"""PPO on Atari: an agent learns a game from its screen, in one file.

    python ppo_atari.py --env-id PongNoFrameskip-v4                            # the full run: 10M steps
    python ppo_atari.py --env-id PongNoFrameskip-v4 --total-timesteps 100000   # a look, a few minutes
    python ppo_atari.py --resume runs/NAME                                     # go on where it stopped

The algorithm, in the names of the code below:

    for each iteration:
        play num_steps steps in num_envs games with the present policy; store
            obs, action, log_prob, value, reward, terminated, truncated      # a rollout, [T, N]
        advantages = compute_gae(...)          # how much better than expected was each action?
        returns = advantages + values          # what the value should have been
        for each of update_epochs passes, for each shuffled minibatch:
            ratio = pi_new(action | obs) / pi_old(action | obs)
            loss = clipped_policy_loss + vf_coef * clipped_value_loss - ent_coef * entropy
            one Adam step, gradient norm clipped

What to expect: README.md has the measured speed, scores and curves, each with its command.

Papers: PPO, Schulman et al. 2017, arXiv:1707.06347. GAE, Schulman et al. 2016, arXiv:1506.02438. The network, Mnih et al. 2015.
"Detail n" in a comment is number n of "The 37 Implementation Details of PPO", Huang et al., ICLR Blog Track 2022.
"""

import contextlib
import csv
import ctypes
import dataclasses
import difflib
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

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

gym.register_envs(ale_py)


# ===== ARGUMENTS ==============================================================================================================
@dataclass
class Args:
    """PPO on Atari. Defaults are those of Schulman et al. 2017 and openai/baselines unless a line says otherwise."""

    # ----- the run ------------------------------------------------------------------------------------------------------------
    exp_name: str = re.sub(r"[^\w.-]", "-", Path(__file__).stem)  # name of the experiment, part of the run folder's name
    seed: int = 1  # seed of every random generator; the same seed gives the same run on the same machine
    torch_deterministic: bool = True  # ask cuDNN for deterministic algorithms (a CPU is deterministic anyway)
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of the trunk; auto: bf16 where the hardware has it, else fp32
    compile: bool = False  # compile the loss with torch.compile, for a minute at the start; never needed
    resume: str | None = None  # go on with this run (runs/NAME) in its folder; the arguments come from the run
    init_from: str | None = None  # start a new run from the parameters of this one (runs/NAME)
    checkpoint_interval: int = 100_000  # environment steps between checkpoints; a killed run replays these when resumed
    eval_episodes: int = 0  # full games to play with the trained agent at the end
    save_model: bool = False  # at the end also write the bare state_dict, {exp_name}.cleanrl_model
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works); else nothing touches the network
    wandb_project_name: str = "cleanRL"  # W&B project (CleanRL's default, so that runs stand beside older ones)
    wandb_entity: str | None = None  # W&B user or team; None is your own default

    # ----- the game -----------------------------------------------------------------------------------------------------------
    env_id: str = "BreakoutNoFrameskip-v4"  # NAMENoFrameskip-v4, or ALE/NAME-v5 (with sticky actions, probability 0.25)
    full_action_space: bool = False  # let the policy choose among all 18 joystick actions, not only the game's own
    mask_actions: bool = False  # with --full-action-space: mask those that the game does not use
    clip_reward: bool = True  # learn from the sign of the reward (detail 19); the returns reported are always the game's

    # ----- the algorithm ------------------------------------------------------------------------------------------------------
    total_timesteps: int = 10_000_000  # steps of all games together, rounded up to whole rollouts; a step is 4 frames
    learning_rate: float = 2.5e-4  # Adam's step size at the start
    anneal_lr: bool = True  # lower the learning rate linearly to 0 over the run (detail 4)
    num_envs: int = 8  # games played side by side (detail 1)
    num_steps: int = 128  # steps of each game in a rollout; num_envs * num_steps samples are learned from at a time
    gamma: float = 0.99  # discount of the reward, a step
    gae_lambda: float = 0.95  # from 0, trust the critic, to 1, trust the rewards (detail 5)
    num_minibatches: int = 4  # minibatches in a pass over the rollout; must divide num_envs * num_steps (detail 6)
    update_epochs: int = 4  # passes over a rollout; more learn faster and less stably, a smaller clip_coef may then help
    norm_adv: bool = True  # normalise the advantages of each minibatch (detail 7)
    clip_coef: float = 0.1  # clip range of the probability ratio (detail 8), and of the value with --clip-vloss
    anneal_clip: bool = False  # lower clip_coef linearly to 0 over the run, as the paper does on Atari
    clip_vloss: bool = True  # clip the value loss too (detail 9)
    ent_coef: float = 0.01  # weight of the entropy bonus (detail 10)
    vf_coef: float = 0.5  # weight of the value loss (detail 10)
    max_grad_norm: float = 0.5  # the gradient of all parameters together is cut to this norm (detail 11)
    target_kl: float | None = None  # leave out a rollout's remaining passes once the KL estimate is above this, say 0.02
    norm_value_targets: bool = False  # let the critic predict normalised returns; for large scores with --no-clip-reward


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
    require(args.full_action_space or not args.mask_actions, "--mask-actions: masks nothing without --full-action-space")

    works = [i for i in gym.registry if re.fullmatch(r"\w+NoFrameskip-v4|ALE/\w+-v5", i) and "game" in gym.registry[i].kwargs]
    if args.env_id not in works:
        spec = gym.registry.get(args.env_id)
        game = spec and spec.kwargs.get("game")  # another variant of a game?
        near = [i for i in works if game and gym.registry[i].kwargs["game"] == game]
        near = near or difflib.get_close_matches(args.env_id, works, 2) or ["BreakoutNoFrameskip-v4", "ALE/Breakout-v5"]
        problem = "a variant that is not supported" if game else "not an Atari game" if spec else "not a known environment"
        fail(f"--env-id {args.env_id}: {problem}; try {' or '.join(near)}")


# ===== ENVIRONMENT ============================================================================================================
class AtariGames(AtariVectorEnv):
    """N Atari games stepped in native threads, each 84x84 grey frames, 4 stacked: obs [N, 4, 84, 84] uint8, rewards raw.

    A lost life is `terminated`, so that the critic expects nothing after it (detail 16), but the game goes on: its end is
    `info["game_over"]` [N], when obs is already the next game's first and `info["final_obs"]` the old one's last. (With the
    emulator's `episodic_life=True` a lost life would restart the game, and the agent would never see its second life.)
    A game starts with one FIRE, where there is that action (detail 17), and up to 29 no-ops (detail 14). After a lost life
    nothing is pressed for the agent: in Breakout it has to learn to serve.
    """

    def __init__(self, env_id: str, num_envs: int, full_action_space: bool) -> None:
        spec = gym.spec(env_id).kwargs
        super().__init__(
            game=spec["game"],
            num_envs=num_envs,
            repeat_action_probability=spec["repeat_action_probability"],  # "sticky actions": 0 or 0.25
            full_action_space=full_action_space,
            autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,  # else the step after an end ignores its action
            life_loss_info=True,
            reward_clipping=False,
            # frame skip 4, maximum of the last two (detail 15), grey 84x84 (18), stack of 4 (20) are the native defaults
        )

    def reset(self, **kwargs) -> tuple[np.ndarray, dict]:
        obs, info = super().reset(**kwargs)
        self.game_start = info["frame_number"] - info["episode_frame_number"]
        return obs, info

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        obs, reward, terminated, truncated, info = super().step(actions)
        # The frame at which the present game began changes when, and only when, a new game has begun.
        game_start = info["frame_number"] - info["episode_frame_number"]
        info["game_over"] = game_start != self.game_start
        self.game_start = game_start
        return obs, reward, terminated, truncated, info


def valid_actions(args: Args, num_actions: int) -> Tensor:
    """Which actions may be played, [A] bool: all of them, or with --mask-actions those that the game itself uses."""
    if not args.mask_actions:
        return torch.ones(num_actions, dtype=torch.bool)
    ale = ale_py.ALEInterface()
    ale.setLoggerMode(ale_py.LoggerMode.Error)
    ale.loadROM(ale_py.roms.get_rom_path(gym.spec(args.env_id).kwargs["game"]))
    return torch.tensor([action in ale.getMinimalActionSet() for action in ale.getLegalActionSet()])


# ===== NETWORK ================================================================================================================
def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights and zero biases (detail 2)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """The network of Mnih et al. 2015 with two heads, policy and value, on one trunk (detail 21)."""

    def __init__(self, num_actions: int, bf16: bool = False) -> None:
        super().__init__()
        self.bf16 = bf16
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),  # [B, 4, 84, 84] -> [B, 32, 20, 20]
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),  # -> [B, 64, 9, 9]
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),  # -> [B, 64, 7, 7]
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)  # nearly uniform at first
        self.critic = layer_init(nn.Linear(512, 1), std=1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs [B, 4, 84, 84] uint8 -> logits [B, A], value [B], both float32."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            # From bytes to 0..1 (detail 22), in the layout in which the convolutions are fastest.
            layout = torch.channels_last if obs.is_cpu and not self.bf16 else torch.contiguous_format
            pixels = obs.to(torch.bfloat16 if self.bf16 else torch.float32, memory_format=layout) / 255.0
            hidden = self.network(pixels)
        with torch.autocast(obs.device.type, enabled=False):  # bfloat16 is too coarse for the heads
            hidden = hidden.float()
            return self.actor(hidden), self.critic(hidden).squeeze(-1)


# ===== FORMULAS ===============================================================================================================
def masked_log_probs(logits: Tensor, mask: Tensor) -> Tensor:
    """log pi(a|s) [B, A] over the actions that `mask` [B, A] allows; the others have probability 0 and get no gradient.

    Huang & Ontanon 2020, arXiv:2006.14171. The fill is finite because -inf * 0 is NaN in the entropy.
    """
    return torch.log_softmax(logits.masked_fill(~mask, torch.finfo(logits.dtype).min), dim=-1)


def masked_entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """H = -sum_a pi(a|s) log pi(a|s) [B] over the allowed actions."""
    return -(log_probs.exp() * log_probs).masked_fill(~mask, 0.0).sum(-1)


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

    `mb` holds obs [M, 4, 84, 84], masks [M, A] and actions, log_probs, values, advantages, returns, each [M].
    """
    logits, values = agent(mb["obs"])
    log_probs = masked_log_probs(logits, mb["masks"])
    log_ratio = log_probs.gather(-1, mb["actions"].unsqueeze(-1)).squeeze(-1) - mb["log_probs"]
    advantages = mb["advantages"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    policy_loss = clipped_policy_loss(log_ratio, advantages, clip_coef)
    value_loss = clipped_value_loss(values, mb["values"], mb["returns"], clip_coef if args.clip_vloss else None)
    entropy = masked_entropy(log_probs, mb["masks"]).mean()
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


# ===== TRAINING ===============================================================================================================
def train(args: Args) -> Path:
    """Trains as `args` say and returns the run folder."""
    check_args(args)
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    device = choose_device(args.device)
    bf16 = choose_bf16(args.precision, device)
    keep_freed_memory()
    seed_everything(args.seed, args.torch_deterministic)

    atari = AtariGames(args.env_id, args.num_envs, args.full_action_space)
    envs = ResumableVectorEnv(atari, args.seed, args.checkpoint_interval)
    num_actions = int(atari.single_action_space.n)
    mask = valid_actions(args, num_actions).to(device).expand(args.num_envs, -1)  # [N, A]
    agent, value_norm = Agent(num_actions, bf16).to(device), ValueNorm().to(device)
    learned = {"agent": agent, "value_norm": value_norm}
    if args.init_from and not checkpoint:
        load_state(learned, load_checkpoint(args.init_from), args.init_from)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)  # detail 3
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
        return {name: part.state_dict() for name, part in parts.items()} | counters

    # The rollout: T steps of N games. Frames stay uint8, a quarter of the memory of float32.
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros((*shape, 4, 84, 84), dtype=torch.uint8, device=device)  # [T, N, 4, 84, 84]
    masks = torch.zeros((*shape, num_actions), dtype=torch.bool, device=device)  # [T, N, A]
    actions = torch.zeros(shape, dtype=torch.int64, device=device)  # [T, N], as are all the others
    log_probs, values, final_values = (torch.zeros(shape, device=device) for _ in range(3))
    rewards = torch.zeros(shape)
    terminateds, truncateds = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)

    about = f"{num_actions} actions, {args.num_envs} games at once; {num_iterations:,} iterations of {batch_size:,} steps"
    with contextlib.closing(envs), Run(args, checkpoint, num_iterations * batch_size, device, bf16, about) as run:
        next_obs, _ = envs.load_state_dict(checkpoint["envs"]) if checkpoint else envs.reset()
        run.save(snapshot(first_iteration - 1))
        for iteration in range(first_iteration, num_iterations + 1):
            remaining = 1 - (iteration - 1) / num_iterations  # from 1 at the start towards 0
            learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1)  # detail 4
            clip_coef = torch.tensor(args.clip_coef * (remaining if args.anneal_clip else 1), device=device)
            optimizer.param_groups[0]["lr"] = learning_rate

            # ----- COLLECT A ROLLOUT
            # The outer autocast keeps one bfloat16 copy of the weights for the whole rollout, which does not change them.
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                value_mean, value_std = value_norm.statistics()
                for t in range(args.num_steps):
                    obs[t], masks[t] = torch.from_numpy(next_obs), mask
                    logits, value = agent(obs[t])
                    log_prob = masked_log_probs(logits, masks[t])
                    action = torch.multinomial(log_prob.exp(), 1)  # [N, 1]
                    actions[t], log_probs[t] = action.squeeze(-1), log_prob.gather(-1, action).squeeze(-1)
                    values[t] = value * value_std + value_mean

                    next_obs, reward, terminated, truncated, info = envs.step(actions[t].cpu().numpy())
                    global_step += args.num_envs
                    run.log_step(global_step, reward, info["game_over"])
                    rewards[t] = torch.from_numpy(np.sign(reward) if args.clip_reward else reward)
                    terminateds[t], truncateds[t] = torch.from_numpy(terminated), torch.from_numpy(truncated)
                    if truncated.any():  # a time limit: the true successor is not the next game's first observation
                        final_obs = np.where(truncated[:, None, None, None], info["final_obs"], 0)  # the other rows are garbage
                        final_values[t] = agent(torch.from_numpy(final_obs).to(device))[1] * value_std + value_mean
                last_value = agent(torch.from_numpy(next_obs).to(device))[1] * value_std + value_mean

            # ----- ESTIMATE THE ADVANTAGES
            terminations, truncations = terminateds.to(device), truncateds.to(device)  # [T, N]
            done = terminations | truncations
            next_values = torch.where(truncations, final_values, torch.cat([values[1:], last_value.unsqueeze(0)]))
            advantages = compute_gae(rewards.to(device), values, next_values, terminations, done, args.gamma, args.gae_lambda)
            returns = advantages + values
            if args.norm_value_targets:
                value_norm.update(returns)
            value_mean, value_std = value_norm.statistics()  # the same for targets and old values

            # ----- UPDATE THE NETWORK
            batch = {"obs": obs, "masks": masks, "actions": actions, "log_probs": log_probs, "advantages": advantages}
            batch |= {"values": (values - value_mean) / value_std, "returns": (returns - value_mean) / value_std}
            batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}  # [T, N, ...] -> [B, ...]
            metrics = []
            for _ in range(args.update_epochs):
                for mb_indices in torch.randperm(batch_size).to(device).chunk(args.num_minibatches):
                    mb = {name: tensor[mb_indices] for name, tensor in batch.items()}
                    loss, mb_metrics = loss_function(agent, mb, clip_coef, args)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # detail 11
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
def evaluate(folder: str | Path, episodes: int = 10, seed: int = 0, greedy: bool = False, device: str = "auto") -> list[float]:
    """Plays full games with a run's agent in the environments it was trained in; returns the game's own score of each.

    Actions are sampled as in training, or are the most probable ones where `greedy`. Each environment plays a share of the
    games that is settled beforehand: to take the first to finish would favour short games.
    """
    require(episodes >= 1, f"episodes {episodes}: must be 1 or more")
    checkpoint, target = load_checkpoint(folder), choose_device(device)
    args = Args(**checkpoint["args"])
    num_envs = min(episodes, args.num_envs)
    envs = AtariGames(args.env_id, num_envs, args.full_action_space)
    num_actions = int(envs.single_action_space.n)
    agent = Agent(num_actions, choose_bf16(args.precision, target)).to(target)
    load_state({"agent": agent}, checkpoint, folder)
    mask = valid_actions(args, num_actions).to(target).expand(num_envs, -1)
    generator = torch.Generator(target).manual_seed(seed)

    share = [len(range(i, episodes, num_envs)) for i in range(num_envs)]
    scores, episode_return = [[] for _ in share], np.zeros(num_envs)
    with contextlib.closing(envs):
        obs, _ = envs.reset(seed=np.random.SeedSequence(seed).generate_state(num_envs).astype(np.int64) >> 1)
        while any(len(finished) < number for finished, number in zip(scores, share, strict=True)):
            log_prob = masked_log_probs(agent(torch.from_numpy(obs).to(target))[0], mask)
            sampled = torch.multinomial(log_prob.exp(), 1, generator=generator).squeeze(-1)
            obs, reward, _, _, info = envs.step((log_prob.argmax(-1) if greedy else sampled).cpu().numpy())
            episode_return += reward
            for i in np.flatnonzero(info["game_over"]):
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
