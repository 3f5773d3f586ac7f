"""PPO on Atari: an agent learns a game from its screen, in one file.

    python ppo_atari.py --env-id PongNoFrameskip-v4                            # the full run: 10M steps
    python ppo_atari.py --env-id PongNoFrameskip-v4 --total-timesteps 100000   # a look, a few minutes
    python ppo_atari.py --resume runs/NAME                                     # go on where it stopped

The algorithm, in the names of the code below:

    for each iteration:
        play num_steps steps in num_envs games with the present policy; store
            obs, action, log_prob, value, reward, terminated, done      # a rollout, [T, N]
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
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, Optional

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


# ==============================================================================================================================
# ARGUMENTS
# ==============================================================================================================================
@dataclass
class Args:
    """PPO on Atari. Defaults are those of Schulman et al. 2017 and openai/baselines unless a line says otherwise."""

    # ----- the run ------------------------------------------------------------------------------------------------------------
    exp_name: str = Path(__file__).stem
    """name of the experiment, part of the run folder's name (default: this file's name)"""
    seed: int = 1
    """seed of every random generator, 0 or more; the same seed gives the same run on the same machine"""
    torch_deterministic: bool = True
    """ask cuDNN for deterministic algorithms (no effect on a CPU, which is deterministic anyway)"""
    device: str = "auto"
    """auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """arithmetic of the convolutional trunk; auto is bf16 where the hardware has native bfloat16, else fp32"""
    compile: bool = False
    """compile the loss with torch.compile: a minute or so of compiling first; never needed"""
    resume: Optional[str] = None
    """go on with this run folder (runs/NAME) in place; the arguments come from the run"""
    init_from: Optional[str] = None
    """start a new run from the parameters of this run folder (same number of actions)"""
    checkpoint_interval: int = 100_000
    """environment steps between two checkpoints; a killed run loses less than this"""
    eval_episodes: int = 0
    """full games to play with the trained agent at the end; 0 for none"""
    save_model: bool = False
    """also write the bare state_dict as {exp_name}.cleanrl_model, with CleanRL's parameter names"""
    track: bool = False
    """also log to Weights & Biases (WANDB_MODE=offline works); without this nothing touches the network"""
    wandb_project_name: str = "cleanRL"
    """W&B project (CleanRL's default, so that runs stand beside older ones)"""
    wandb_entity: Optional[str] = None
    """W&B user or team; None is your default"""

    # ----- the game -----------------------------------------------------------------------------------------------------------
    env_id: str = "BreakoutNoFrameskip-v4"
    """NAMENoFrameskip-v4 (classic protocol) or ALE/NAME-v5 (sticky actions with probability 0.25)"""
    full_action_space: bool = False
    """let the policy choose among all 18 joystick actions instead of the game's own"""
    mask_actions: bool = False
    """with --full-action-space: mask the actions that the game does not use (invalid-action masking)"""
    clip_reward: bool = True
    """learn from the sign of the reward (detail 19); what is reported is always the game's own score"""

    # ----- the algorithm ------------------------------------------------------------------------------------------------------
    total_timesteps: int = 10_000_000
    """environment steps of the whole run, all environments together (1 step = 4 frames)"""
    learning_rate: float = 2.5e-4
    """Adam's learning rate at the start"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0 over the run (detail 4)"""
    num_envs: int = 8
    """games played side by side (detail 1)"""
    num_steps: int = 128
    """steps of each game in a rollout; a rollout has num_envs * num_steps samples"""
    gamma: float = 0.99
    """discount a step, 0 to 1"""
    gae_lambda: float = 0.95
    """lambda of GAE, 0 (one-step) to 1 (Monte Carlo) (detail 5)"""
    num_minibatches: int = 4
    """minibatches in one pass over the rollout; must divide num_envs * num_steps (detail 6)"""
    update_epochs: int = 4
    """passes over each rollout; more learns faster and less stably, for which a smaller clip_coef may help"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch (detail 7)"""
    clip_coef: float = 0.1
    """clip range of the probability ratio, and of the value where clip_vloss is on (detail 8)"""
    anneal_clip: bool = False
    """lower clip_coef linearly to 0 over the run, as the PPO paper does on Atari"""
    clip_vloss: bool = True
    """clip the value loss as well (detail 9)"""
    ent_coef: float = 0.01
    """weight of the entropy bonus (detail 10)"""
    vf_coef: float = 0.5
    """weight of the value loss (detail 10)"""
    max_grad_norm: float = 0.5
    """largest norm of the gradient of all parameters together (detail 11)"""
    target_kl: Optional[float] = None
    """skip an iteration's remaining epochs once the KL estimate is over this, e.g. 0.02; None never stops"""
    norm_value_targets: bool = False
    """let the critic predict normalised returns, for games of large scores with --no-clip-reward"""


def check_args(args: Args) -> None:
    """Answers a bad argument in one clear line, with exit code 2, before anything is made."""
    check_run_args(args)
    for name in ("num_envs", "num_steps", "num_minibatches", "update_epochs", "checkpoint_interval"):
        require(getattr(args, name) >= 1, f"--{name} {getattr(args, name)}: must be 1 or more")
    for name in ("learning_rate", "clip_coef", "max_grad_norm"):
        require(0 < getattr(args, name) < math.inf, f"--{name} {getattr(args, name)}: must be a finite number above 0")
    for name in ("ent_coef", "vf_coef"):
        require(0 <= getattr(args, name) < math.inf, f"--{name} {getattr(args, name)}: must be a finite number, 0 or more")
    for name in ("gamma", "gae_lambda"):
        require(0 <= getattr(args, name) <= 1, f"--{name} {getattr(args, name)}: must be from 0 to 1")
    require(args.target_kl is None or args.target_kl > 0, f"--target_kl {args.target_kl}: must be above 0, or None")
    batch_size = args.num_envs * args.num_steps
    require(
        args.total_timesteps >= batch_size,
        f"--total_timesteps {args.total_timesteps}: less than one iteration of num_envs * num_steps = {batch_size} steps",
    )
    require(
        batch_size % args.num_minibatches == 0,
        f"--num_minibatches {args.num_minibatches}: must divide num_envs * num_steps = {batch_size}",
    )
    require(
        not args.norm_adv or batch_size // args.num_minibatches > 1,
        f"--num_minibatches {args.num_minibatches}: leaves 1 sample a minibatch, too few for --norm_adv",
    )
    require(
        args.full_action_space or not args.mask_actions,
        "--mask_actions: has nothing to mask without --full_action_space",
    )
    works = [i for i in gym.registry if re.fullmatch(r"\w+NoFrameskip-v4|ALE/\w+-v5", i) and "game" in gym.registry[i].kwargs]
    if args.env_id not in works:
        spec = gym.registry.get(args.env_id)
        if spec is not None and "game" in spec.kwargs:
            name = re.sub(r"^ALE/|(NoFrameskip)?-v\d+$", "", args.env_id)
            near = [i for i in works if i in (f"{name}NoFrameskip-v4", f"ALE/{name}-v5")]
            fail(f"--env_id {args.env_id}: this variant is not supported; what works is {' or '.join(near)}")
        reason = "is not an Atari game" if spec is not None else "is not a known environment"
        near = difflib.get_close_matches(args.env_id, works, 2, 0.5) or ["BreakoutNoFrameskip-v4", "ALE/Breakout-v5"]
        fail(f"--env_id {args.env_id}: {reason}; ids are like {' or '.join(near)}")


# ==============================================================================================================================
# ENVIRONMENT
# ==============================================================================================================================
class AtariGames(AtariVectorEnv):
    """N Atari games stepped in native threads, each 84x84 grey frames, 4 stacked: obs [N, 4, 84, 84] uint8, rewards raw.

    A lost life is `terminated` (nothing of value follows it: detail 16) but the game goes on; `info["game_over"]` [N] tells the
    end of a whole game, after which obs is the first of the next one and `info["final_obs"]` the last of the old one. (The
    emulator's `episodic_life=True` would restart the game at each life, so that the agent never saw its second one.)

    After a reset, one FIRE (detail 17, where the game has that action) and up to 30 no-ops (detail 14). After a lost life
    nothing is pressed for the agent: in Breakout it has to learn to serve, which it does within some 100 thousand steps.
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


# ==============================================================================================================================
# NETWORK
# ==============================================================================================================================
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
            pixels = obs.to(torch.bfloat16 if self.bf16 else torch.float32) / 255.0  # 0 to 1 (detail 22)
            hidden = self.network(pixels)
        with torch.autocast(obs.device.type, enabled=False):  # bfloat16 is too coarse for the heads
            hidden = hidden.float()
            return self.actor(hidden), self.critic(hidden).squeeze(-1)


# ==============================================================================================================================
# FORMULAS
# ==============================================================================================================================
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
    """Generalised advantage estimation, arXiv:1506.02438, equations 11, 12 and 16 (detail 5). All [T, N].

        delta_t = r_t + gamma * (1 - terminated_t) * V(s'_t) - V(s_t)
        A_t     = delta_t + gamma * lambda * (1 - done_t) * A_{t+1}

    `next_values` is V of the true successor s'_t, the final observation where an episode ended. A time limit (truncation) is
    `done` but not `terminated`: the sum over the future stops there, its estimate V(s'_t) does not.
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    decays = gamma * gae_lambda * (~done).float()
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
    """Mean and standard deviation of the returns, a moving average over iterations (bias-corrected as in Adam).

    Until the first `update` it is the identity, and so it stays without --norm-value-targets. Order matters (van Hasselt et
    al. 2016, arXiv:1602.07714; without their correction of the output layer): GAE in raw units, then `update`, then targets.
    """

    def __init__(self, momentum: float = 0.99) -> None:
        super().__init__()
        self.momentum = momentum
        for name in ("weight", "mean_ema", "square_ema"):
            self.register_buffer(name, torch.zeros(()))

    def update(self, returns: Tensor) -> None:
        for ema, value in ((self.weight, 1.0), (self.mean_ema, returns.mean()), (self.square_ema, returns.square().mean())):
            ema.mul_(self.momentum).add_((1 - self.momentum) * value)

    def statistics(self) -> tuple[Tensor, Tensor]:
        if self.weight == 0:
            return torch.zeros_like(self.weight), torch.ones_like(self.weight)
        mean = self.mean_ema / self.weight
        return mean, (self.square_ema / self.weight - mean**2).clamp(min=1e-4).sqrt()


# ==============================================================================================================================
# TRAINING
# ==============================================================================================================================
def train(args: Args) -> Path:
    """Trains as `args` say and returns the run folder."""
    check_args(args)
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    device, bf16 = choose_device(args.device), args.precision == "bf16"
    if args.precision == "auto":
        bf16 = has_native_bf16(device)
    keep_freed_memory()
    seed_everything(args.seed, args.torch_deterministic)

    envs = ResumableVectorEnv(
        AtariGames(args.env_id, args.num_envs, args.full_action_space), args.seed, args.checkpoint_interval
    )
    num_actions = int(envs.envs.single_action_space.n)
    mask = valid_actions(args, num_actions).to(device).expand(args.num_envs, -1)  # [N, A]
    agent, value_norm = Agent(num_actions, bf16).to(device), ValueNorm().to(device)
    if device.type == "cpu" and not bf16:
        agent = agent.to(memory_format=torch.channels_last)  # the faster layout for fp32 convolutions on a CPU
    if args.init_from:
        initial = load_checkpoint(args.init_from)
        load_parameters(agent, initial["agent"], args.init_from)
        value_norm.load_state_dict(initial["value_norm"])
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)  # detail 3
    loss_function = torch.compile(ppo_loss) if args.compile else ppo_loss

    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = math.ceil(args.total_timesteps / batch_size)

    if checkpoint is None:
        first_iteration, global_step = 1, 0
        episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, dtype=np.int64)
        next_obs, _ = envs.reset()
    else:
        load_parameters(agent, checkpoint["agent"], args.resume)
        value_norm.load_state_dict(checkpoint["value_norm"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_iteration, global_step = checkpoint["iteration"] + 1, checkpoint["global_step"]
        episode_return, episode_length = checkpoint["episode_return"].numpy(), checkpoint["episode_length"].numpy()
        next_obs, _ = envs.load_state_dict(checkpoint["envs"])
        set_rng_state(checkpoint["rng"])

    # The rollout: T steps of N games. Frames stay uint8, a quarter of the memory of float32.
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(shape + (4, 84, 84), dtype=torch.uint8, device=device)  # [T, N, 4, 84, 84]
    masks = torch.zeros(shape + (num_actions,), dtype=torch.bool, device=device)  # [T, N, A]
    actions = torch.zeros(shape, dtype=torch.int64, device=device)  # [T, N], as all that follow
    log_probs, values, next_values = (torch.zeros(shape, device=device) for _ in range(3))
    rewards, terminateds, dones = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)

    def state() -> dict:
        """All that resuming and evaluating need: tensors and plain values only."""
        return {
            "agent": agent.state_dict(),
            "value_norm": value_norm.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iteration": iteration,
            "global_step": global_step,
            "episode_return": torch.from_numpy(episode_return),
            "episode_length": torch.from_numpy(episode_length),
            "envs": envs.state_dict(),
            "rng": rng_state(),
        }

    iteration = first_iteration - 1
    about = f"{num_actions} actions, {args.num_envs} games; {num_iterations:,} iterations of {batch_size:,} steps"
    with contextlib.closing(envs), Run(args, checkpoint, num_iterations * batch_size, device, bf16, about) as run:
        if checkpoint is None:
            run.save(state())
        for iteration in range(first_iteration, num_iterations + 1):
            remaining = 1 - (iteration - 1) / num_iterations  # 1 at the start, to 0 at the end
            learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1)  # detail 4
            clip_coef = torch.tensor(args.clip_coef * (remaining if args.anneal_clip else 1), device=device)
            optimizer.param_groups[0]["lr"] = learning_rate

            # ----- COLLECT A ROLLOUT ------------------------------------------------------------------------------------------
            # One autocast around the whole rollout, so that the weights are cast to bf16 once and not at every step.
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                value_mean, value_std = value_norm.statistics()
                for step in range(args.num_steps):
                    obs[step], masks[step] = torch.from_numpy(next_obs), mask
                    logits, value = agent(obs[step])
                    step_log_probs = masked_log_probs(logits, mask)
                    action = torch.multinomial(step_log_probs.exp(), 1)  # [N, 1]
                    actions[step] = action.squeeze(-1)
                    log_probs[step] = step_log_probs.gather(-1, action).squeeze(-1)
                    values[step] = value * value_std + value_mean

                    next_obs, reward, terminated, truncated, info = envs.step(actions[step].cpu().numpy())
                    global_step += args.num_envs
                    rewards[step] = torch.from_numpy(np.sign(reward) if args.clip_reward else reward)
                    terminateds[step] = torch.from_numpy(terminated)
                    dones[step] = torch.from_numpy(terminated | truncated)
                    if truncated.any():  # the successor is the final observation, not the next game's first
                        final_obs = torch.from_numpy(np.where(truncated[:, None, None, None], info["final_obs"], 0)).to(device)
                        next_values[step] = agent(final_obs)[1] * value_std + value_mean

                    episode_return += reward  # the game's own score, over all lives
                    episode_length += 1
                    for i in np.flatnonzero(info["game_over"]):
                        run.log_episode(global_step, episode_return[i], episode_length[i])
                        episode_return[i], episode_length[i] = 0, 0
                last_value = agent(torch.from_numpy(next_obs).to(device))[1] * value_std + value_mean

            # ----- ESTIMATE THE ADVANTAGES ------------------------------------------------------------------------------------
            truncated_steps = (dones & ~terminateds).to(device)
            successors = torch.cat([values[1:], last_value.unsqueeze(0)])
            next_values = torch.where(truncated_steps, next_values, successors)
            advantages = compute_gae(
                rewards.to(device), values, next_values, terminateds.to(device), dones.to(device), args.gamma, args.gae_lambda
            )
            returns = advantages + values
            explained_variance = 1 - (returns - values).var() / returns.var()
            if args.norm_value_targets:
                value_norm.update(returns)
            value_mean, value_std = value_norm.statistics()

            # ----- UPDATE THE NETWORK -----------------------------------------------------------------------------------------
            batch = {
                "obs": obs,
                "masks": masks,
                "actions": actions,
                "log_probs": log_probs,
                "values": (values - value_mean) / value_std,
                "advantages": advantages,
                "returns": (returns - value_mean) / value_std,
            }
            batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}  # [T, N, ...] -> [B, ...]
            metrics = []
            for _ in range(args.update_epochs):
                for mb_indices in torch.randperm(batch_size).to(device).split(minibatch_size):
                    mb = {name: tensor[mb_indices] for name, tensor in batch.items()}
                    loss, mb_metrics = loss_function(agent, mb, clip_coef, args)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # detail 11
                    optimizer.step()
                    metrics.append(mb_metrics)
                if args.target_kl is not None and mb_metrics[LOSS_NAMES.index("approx_kl")] > args.target_kl:
                    break

            # ----- LOG AND SAVE -----------------------------------------------------------------------------------------------
            losses = dict(zip(LOSS_NAMES, torch.stack(metrics).mean(0).tolist(), strict=True))
            losses["explained_variance"] = explained_variance.item()
            run.log(global_step, {"charts/learning_rate": learning_rate} | {f"losses/{k}": v for k, v in losses.items()})
            if run.wants_checkpoint(global_step) or iteration == num_iterations:
                run.save(state())
            if run.stopped:
                break
        else:
            if args.save_model:
                torch.save(agent.state_dict(), run.folder / f"{args.exp_name}.cleanrl_model")
            if args.eval_episodes:
                scores = evaluate(run.folder, args.eval_episodes, device=args.device)
                run.log_evaluation(global_step, scores)
    return run.finish()


# ==============================================================================================================================
# EVALUATION
# ==============================================================================================================================
@torch.no_grad()
def evaluate(
    run_folder: str | Path, episodes: int = 10, seed: int = 0, greedy: bool = False, device: str = "auto"
) -> list[float]:
    """Plays full games with the agent of a run, in the environments it was trained in; returns the raw score of each.

    Actions are sampled as in training, or the most probable ones where `greedy`. Which game counts is settled beforehand
    (each environment plays its share), so that short games are not favoured.
    """
    checkpoint = load_checkpoint(run_folder)
    args, target = Args(**checkpoint["args"]), choose_device(device)
    num_envs = min(episodes, args.num_envs)
    envs = AtariGames(args.env_id, num_envs, args.full_action_space)
    num_actions = int(envs.single_action_space.n)
    bf16 = has_native_bf16(target) if args.precision == "auto" else args.precision == "bf16"
    agent = Agent(num_actions, bf16).to(target)
    load_parameters(agent, checkpoint["agent"], run_folder)
    mask = valid_actions(args, num_actions).to(target).expand(num_envs, -1)
    generator = torch.Generator(target).manual_seed(seed)

    scores = [[] for _ in range(num_envs)]
    quota = [len(range(i, episodes, num_envs)) for i in range(num_envs)]
    episode_return = np.zeros(num_envs)
    obs, _ = envs.reset(seed=seed)
    with contextlib.closing(envs):
        while any(len(done) < share for done, share in zip(scores, quota, strict=True)):
            log_probs = masked_log_probs(agent(torch.from_numpy(obs).to(target))[0], mask)
            sampled = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(-1)
            action = log_probs.argmax(-1) if greedy else sampled
            obs, reward, _, _, info = envs.step(action.cpu().numpy())
            episode_return += reward
            for i in np.flatnonzero(info["game_over"]):
                scores[i].append(float(episode_return[i]))
                episode_return[i] = 0
    return [score for done, share in zip(scores, quota, strict=True) for score in done[:share]]


# ==============================================================================================================================
# RUN KEEPING: from here to the end nothing depends on the algorithm; the block is the same, letter for letter, in all scripts
# ==============================================================================================================================
RESUME_MAY_CHANGE = {"device", "eval_episodes", "resume", "save_model", "total_timesteps", "track"} | {
    "wandb_entity",
    "wandb_project_name",
}


def fail(message: str) -> NoReturn:
    """Ends the program with one line on stderr and exit code 2, as for any wrong command line."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def require(condition: bool, message: str) -> None:
    if not condition:
        fail(message)


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args; with --resume, the run's own arguments are the defaults."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    folder = parser.parse_known_args(argv)[0].resume
    default = Args() if folder is None else Args(**load_checkpoint(folder)["args"])
    args = tyro.cli(Args, args=argv, default=default)
    check_args(args)
    return args


def check_run_args(args: Args) -> None:
    """The checks that all scripts share."""
    require(0 <= args.seed < 2**32, f"--seed {args.seed}: must be from 0 to {2**32 - 1}")
    require(args.eval_episodes >= 0, f"--eval_episodes {args.eval_episodes}: must be 0 or more")
    require(
        re.fullmatch(r"[\w.-]+", args.exp_name) is not None,
        f"--exp_name {args.exp_name!r}: letters, digits and . _ - only, for it becomes part of a file name",
    )
    choose_device(args.device)
    if args.compile and shutil.which(os.environ.get("CXX", "c++")) is None and choose_device(args.device).type == "cpu":
        fail("--compile: needs a C++ compiler (c++, or the one that CXX names); leave the flag out, it only saves time")
    if args.init_from:
        load_checkpoint(args.init_from)
    if args.resume is None:
        return
    require(args.init_from is None or args.init_from == load_checkpoint(args.resume)["args"]["init_from"], "--init_from: a run can be resumed or started from another, not both")
    for name, of_run in load_checkpoint(args.resume)["args"].items():
        given = getattr(args, name)
        if name == "total_timesteps":
            require(given >= of_run, f"--{name} {given}: less than the {of_run} of {args.resume}; it may only grow")
        elif name not in RESUME_MAY_CHANGE:
            require(given == of_run, f"--{name} {given}: {args.resume} was started with {of_run}, which a resume cannot change")


def choose_device(name: str) -> torch.device:
    """auto, cpu, cuda, cuda:N or mps -> a device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    require(re.fullmatch(r"cpu|mps|cuda(:\d+)?", name) is not None, f"--device {name}: must be auto, cpu, cuda, cuda:N or mps")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        require((device.index or 0) < count, f"--device {name}: this machine has {count} usable CUDA devices; try auto or cpu")
    require(device.type != "mps" or torch.backends.mps.is_available(), f"--device {name}: not available here; try auto or cpu")
    return device


def has_native_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware (emulation would be slower than float32)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory for the next batch; by default it gives large blocks back and faults them in again."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no private mapping for each large block
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap


def seed_everything(seed: int, deterministic: bool) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic


def rng_state() -> dict:
    """The state of every global random generator, as plain values and tensors."""
    name, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest], "torch": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: dict) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


class ResumableVectorEnv:
    """A vector environment that can be put back where it was, although emulators give no snapshot of themselves.

    An episode is its seed and its actions: this remembers the seed of each environment's last seeded reset and all actions
    since; restoring resets with those seeds and plays those actions again. To keep the log short, the first end of an episode
    after each multiple of `interval` steps is followed by a seeded reset, whether or not the run is ever interrupted.
    It needs SAME_STEP autoreset. info["game_over"] [N] tells the end of an episode, where it differs from the usual one.
    """

    def __init__(self, envs: gym.vector.VectorEnv, seed: int, interval: int) -> None:
        self.envs, self.seed, self.interval = envs, seed, interval
        self.steps = 0  # of all environments together
        self.actions = []  # [N] each, the oldest first
        self.start = np.zeros(envs.num_envs, dtype=np.int64)  # where in `actions` each environment's seeded reset lies
        self.segment = np.zeros(envs.num_envs, dtype=np.int64)  # steps // interval at that reset; gives its seed

    def reset(self) -> tuple[np.ndarray, dict]:
        return self._seeded_reset(np.ones(self.envs.num_envs, dtype=bool))

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        obs, reward, terminated, truncated, info = self.envs.step(action)
        self.actions.append(action.copy())
        self.steps += self.envs.num_envs
        due = info.get("game_over", terminated | truncated) & (self.segment < self.steps // self.interval)
        if due.any():
            self.segment[due], self.start[due] = self.steps // self.interval, len(self.actions)
            del self.actions[: self.start.min()]
            self.start -= self.start.min()
            obs, reset_info = self._seeded_reset(due)
            for key in info.keys() & reset_info.keys():
                info[key][due] = reset_info[key][due]
        return obs, reward, terminated, truncated, info

    def _seeded_reset(self, mask: np.ndarray) -> tuple[np.ndarray, dict]:
        """Resets the environments of mask [N] with their seeds and leaves the others where they are."""
        seeds = [np.random.SeedSequence((self.seed, i, int(k))).generate_state(1)[0] >> 1 for i, k in enumerate(self.segment)]
        options = {} if mask.all() else {"options": {"reset_mask": mask}}
        if isinstance(self.envs, (gym.vector.SyncVectorEnv, gym.vector.AsyncVectorEnv)):
            return self.envs.reset(seed=[int(seed) for seed in seeds], **options)
        return self.envs.reset(seed=np.array(seeds, dtype=np.int64)[mask], **options)

    def state_dict(self) -> dict:
        actions = np.array(self.actions).reshape(len(self.actions), *self.envs.action_space.shape)
        if self.actions and actions.dtype.kind == "i":
            actions = actions.astype(np.min_scalar_type(int(actions.max())))  # a byte each for up to 256 actions
        arrays = {"actions": actions, "start": self.start, "segment": self.segment}
        return {"steps": self.steps} | {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load_state_dict(self, state: dict) -> tuple[np.ndarray, dict]:
        """Restores the environments and returns their present observations and info."""
        self.steps = state["steps"]
        self.start, self.segment = state["start"].numpy().copy(), state["segment"].numpy().copy()
        self.actions = list(state["actions"].numpy().astype(self.envs.single_action_space.dtype))
        obs, info = self.reset()
        for t, action in enumerate(self.actions):
            if t > 0 and (self.start == t).any():
                self._seeded_reset(self.start == t)  # its log is shorter: what it was given before was only padding
            obs, _, _, _, info = self.envs.step(action)
        if self.actions and (self.start == len(self.actions)).any():
            obs, info = self._seeded_reset(self.start == len(self.actions))
        return obs, info

    def close(self) -> None:
        self.envs.close()


def load_checkpoint(folder: str | Path) -> dict:
    """Reads a run's checkpoint; tensors and plain values only, so that no file can bring code with it."""
    path = Path(folder) / "checkpoint.pt"
    require(path.is_file(), f"{folder}: is not a run folder (no checkpoint.pt in it)")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        fail(f"{path}: cannot be read, it is damaged or no checkpoint ({str(error).strip().splitlines()[0][:100]})")
    names = {field.name for field in dataclasses.fields(Args)}
    if not isinstance(checkpoint, dict) or set(checkpoint.get("args", ())) != names:
        fail(f"{path}: was not written by this script, or by another version of it")
    return checkpoint


def load_parameters(module: nn.Module, parameters: dict, folder: str | Path) -> None:
    try:
        module.load_state_dict(parameters)
    except RuntimeError as error:
        fail(f"{folder}: its network does not fit this one ({str(error).splitlines()[-1].strip()})")


class Run:
    """One run's folder: CSVs, TensorBoard, W&B, checkpoint, the progress line; Ctrl-C and SIGTERM set `stopped`."""

    def __init__(
        self, args: Args, checkpoint: dict | None, total_steps: int, device: torch.device, bf16: bool, about: str
    ) -> None:
        kept = checkpoint["run"] if checkpoint else {"seconds": 0.0, "games": [], "sizes": {}}
        self.args, self.device, self.total_steps = args, device, total_steps
        self.games = deque([tuple(game) for game in kept["games"]], maxlen=100)  # return and length of the last 100
        self.step = self.saved_step = checkpoint["global_step"] if checkpoint else 0
        self.stopped = None
        try:
            self.folder = Path(args.resume) if args.resume else self._new_folder()
            for name, size in kept["sizes"].items():  # what was written after the checkpoint happens again
                require((self.folder / name).stat().st_size >= size, f"{self.folder / name}: is shorter than the checkpoint knows it")
                os.truncate(self.folder / name, size)
            self.files = {name: open(self.folder / name, "a", newline="") for name in ("episodes.csv", "metrics.csv")}
        except OSError as error:
            fail(f"{error.filename}: the run folder cannot be written ({error.strerror})")
        if checkpoint is None:
            csv.writer(self.files["episodes.csv"]).writerow(("global_step", "episodic_return", "episodic_length", "seconds"))
        self._write_config(bf16)
        if args.track:
            import wandb

            self.wandb = wandb.init(
                project=args.wandb_project_name, entity=args.wandb_entity, name=self.folder.name, id=self.folder.name[-128:],
                config=vars(args), sync_tensorboard=True, save_code=True, resume="allow", dir=self.folder,
            )  # fmt: skip
        self.writer = SummaryWriter(self.folder, purge_step=self.step + 1 if checkpoint else None)
        if checkpoint is None:
            rows = "\n".join(f"|{key}|{value}|" for key, value in vars(args).items())
            self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        self.start = time.perf_counter() - kept["seconds"]
        self.window = deque([(time.perf_counter(), self.step)], maxlen=20)  # for steps per second
        print(f"{args.env_id}: {about}\n{device}, {torch.get_num_threads()} threads, {'bf16' if bf16 else 'fp32'}; {self.folder}")
        if checkpoint:
            print(f"resumed at step {self.step:,}")
            if args.total_timesteps != checkpoint["args"]["total_timesteps"]:
                before = checkpoint["args"]["total_timesteps"]
                print(f"total_timesteps grows from {before:,} to {args.total_timesteps:,}: the schedules stretch")
        layout = "{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
        self.bar = tqdm(total=total_steps, initial=self.step, bar_format=layout, disable=not sys.stderr.isatty(), smoothing=0.05)
        self.printed = time.perf_counter()

    def _new_folder(self) -> Path:
        name = f"{re.sub('[/:]', '-', self.args.env_id)}__{self.args.exp_name}__{self.args.seed}__{int(time.time())}"
        for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
            with contextlib.suppress(FileExistsError):
                folder = Path("runs") / (name + suffix)
                folder.mkdir(parents=True)
                return folder
        fail(f"runs/{name}: exists already")

    def _write_config(self, bf16: bool) -> None:
        path = self.folder / "config.json"
        commands = json.loads(path.read_text())["commands"] if path.is_file() else []
        git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
        try:
            commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip() or None
        except (OSError, subprocess.SubprocessError):
            commit = None
        config = {
            "args": vars(self.args),
            "commands": [*commands, sys.argv],
            "device": str(self.device),
            "precision": "bf16" if bf16 else "fp32",
            "threads": torch.get_num_threads(),
            "git_commit": commit,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
            | {"gymnasium": gym.__version__, "machine": f"{platform.system()} {platform.machine()}"},
        }
        path.write_text(json.dumps(config, indent=2) + "\n")

    def __enter__(self) -> "Run":
        self.handlers = {}
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self._stop)
        return self

    def _stop(self, number: int, _frame) -> None:
        self.stopped = number
        signal.signal(number, signal.SIG_DFL)  # a second one ends the program at once
        tqdm.write(f"{signal.Signals(number).name}: stopping after this iteration; once more stops at once", file=sys.stderr)

    def __exit__(self, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.bar.close()
        self.writer.close()
        for file in self.files.values():
            file.close()
        if self.args.track:
            self.wandb.finish()

    def log_episode(self, global_step: int, episodic_return: float, episodic_length: int) -> None:
        """A finished episode: the return in the game's own units, the length in steps."""
        self.games.append((float(episodic_return), int(episodic_length)))
        seconds = f"{time.perf_counter() - self.start:.1f}"
        csv.writer(self.files["episodes.csv"]).writerow((global_step, f"{episodic_return:g}", int(episodic_length), seconds))
        self.files["episodes.csv"].flush()
        self.writer.add_scalar("charts/episodic_return", episodic_return, global_step)
        self.writer.add_scalar("charts/episodic_length", episodic_length, global_step)

    def log(self, global_step: int, scalars: dict[str, float]) -> None:
        """One row of metrics.csv, the same in TensorBoard, and the progress line."""
        now = time.perf_counter()
        sps = (global_step - self.window[0][1]) / (now - self.window[0][0])
        self.window.append((now, global_step))
        file = self.files["metrics.csv"]
        if file.tell() == 0:
            csv.writer(file).writerow(("global_step", "seconds", "sps", *(name.split("/")[-1] for name in scalars)))
        row = (global_step, f"{now - self.start:.1f}", f"{sps:.0f}", *(f"{value:.7g}" for value in scalars.values()))
        csv.writer(file).writerow(row)
        file.flush()
        self.writer.add_scalar("charts/SPS", sps, global_step)
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, global_step)
        status = f"{sps:,.0f} steps/s"
        if self.games:
            mean_return, mean_length = np.mean(self.games, axis=0)
            self.writer.add_scalar("charts/mean_return_100", mean_return, global_step)
            status += f", last {len(self.games)} games: return {mean_return:.1f}, length {mean_length:.0f}"
        self.bar.set_postfix_str(status, refresh=False)
        self.bar.update(global_step - self.step)
        self.step = global_step
        if self.bar.disable and now - self.printed > 10:
            eta = time.strftime("%H:%M:%S", time.gmtime((self.total_steps - global_step) / max(sps, 1e-9)))
            print(f"{global_step:,}/{self.total_steps:,} ({global_step / self.total_steps:.0%}), {eta} left, {status}", flush=True)
            self.printed = now

    def log_evaluation(self, global_step: int, scores: list[float]) -> None:
        for i, score in enumerate(scores):
            self.writer.add_scalar("eval/episodic_return", score, i)
        tqdm.write(f"evaluation at step {global_step:,}: {len(scores)} games, {np.mean(scores):.1f} +- {np.std(scores):.1f}")

    def wants_checkpoint(self, global_step: int) -> bool:
        interval = self.args.checkpoint_interval
        return bool(self.stopped) or global_step // interval > self.saved_step // interval

    def save(self, state: dict) -> None:
        """Writes checkpoint.pt beside the old one and puts it in its place in one move, so that a kill leaves one of the two."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self.files.items()}
        run = {"seconds": time.perf_counter() - self.start, "games": list(self.games), "sizes": sizes}
        state |= {"args": vars(self.args) | {"resume": None}, "run": run}
        path = self.folder / "checkpoint.pt"
        with open(path.with_suffix(".tmp"), "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".tmp"), path)
        self.saved_step = state["global_step"]

    def finish(self) -> Path:
        """Says how the run ended and how to go on; exits with 128 + the signal's number if a signal ended it."""
        again = f"python {sys.argv[0]} --resume {self.folder}"
        if self.stopped:
            print(f"stopped and saved at step {self.saved_step:,}; to go on: {again}")
            raise SystemExit(128 + self.stopped)
        print(f"done: {self.folder}")
        return self.folder


if __name__ == "__main__":
    train(parse_args())
