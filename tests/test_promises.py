"""The promises that hold for every script: it stands alone, repeats itself, survives kills, answers bad input in one line."""

import difflib
import inspect
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import assert_same, assert_same_run, command, only_run, rows, run_script, saved, train, wait_for_rows

import ppo_atari
import ppo_continuous


@dataclass
class Case:
    """A script and arguments with which it runs in seconds; `step` is the steps of an iteration with them."""

    module: ModuleType
    small: list[str]
    step: int
    other_env: str  # whose networks have another shape
    parameters: set[str]

    @property
    def script(self) -> Path:
        return Path(self.module.__file__).resolve()


CASES = {
    "ppo_atari": Case(
        ppo_atari,
        ["--num-envs", "4", "--num-steps", "32", "--num-minibatches", "2", "--update-epochs", "1"],
        128,
        "PongNoFrameskip-v4",
        {"network.0.weight", "network.7.bias", "actor.weight", "critic.bias"},
    ),
    "ppo_continuous": Case(
        ppo_continuous,
        ["--env-id", "Hopper-v5", "--num-envs", "2", "--num-steps", "64", "--num-minibatches", "4", "--update-epochs", "2"],
        128,
        "InvertedPendulum-v5",
        {"actor_mean.0.weight", "actor_mean.4.bias", "actor_logstd", "critic.4.bias", "obs_norm._extra_state"},
    ),
}


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return CASES[request.param]


# ----- one file, one skeleton -------------------------------------------------------------------------------------------------
def test_run_keeping_is_the_same_block_in_all_scripts():
    blocks = {name: case.script.read_text().split("# RUN KEEPING", 1)[1] for name, case in CASES.items()}
    first, *others = blocks
    for other in others:
        assert not list(difflib.unified_diff(blocks[first].splitlines(), blocks[other].splitlines(), first, other, n=0))
    assert len(blocks[first].splitlines()) > 300


def test_sections_are_the_same_in_all_scripts(case):
    marks = re.findall(r"^# ===== ([A-Z]+) =+$", case.script.read_text(), re.MULTILINE)
    assert marks == ["ARGUMENTS", "ENVIRONMENT", "NETWORK", "FORMULAS", "TRAINING", "EVALUATION"]


@pytest.mark.parametrize(
    "name",
    ["layer_init", "compute_gae", "clipped_policy_loss", "clipped_value_loss", "LOSS_NAMES", "ValueNorm"],
)
def test_what_both_ppo_scripts_share_is_the_same_text(name):
    """So that one test of each formula is enough, and the difference of the two files is the difference of the algorithms."""
    one, other = getattr(ppo_atari, name), getattr(ppo_continuous, name)
    assert one == other if isinstance(one, tuple) else inspect.getsource(one) == inspect.getsource(other)


def test_copied_alone_under_another_name_it_trains_evaluates_and_resumes(case, tmp_path):
    script = shutil.copy(case.script, tmp_path / "my_agent.py")
    arguments = ["--total-timesteps", 6000, *case.small, "--eval-episodes", 3, "--save-model"]
    result = run_script(script, tmp_path, *arguments, PYTHONPATH="")
    assert result.returncode == 0, result.stderr
    assert "evaluation: 3 " in result.stdout and "done: runs/" in result.stdout
    run = only_run(tmp_path)
    assert run.name.startswith(f"{json.loads((run / 'config.json').read_text())['args']['env_id']}__my_agent__1__")
    assert len(rows(run / "episodes.csv")) >= 10 and len(rows(run / "metrics.csv")) == math.ceil(6000 / case.step)
    config = json.loads((run / "config.json").read_text())
    assert config["args"]["total_timesteps"] == 6000 and config["torch"] == torch.__version__
    parameters = torch.load(run / "my_agent.cleanrl_model", weights_only=True)
    assert case.parameters <= parameters.keys()
    assert_same(parameters, saved(run)["agent"], "the bare model")
    again = run_script(script, tmp_path, "--resume", f"runs/{run.name}", "--total-timesteps", 6500, PYTHONPATH="")
    assert again.returncode == 0 and "the schedules stretch" in again.stdout, again.stderr
    assert int(rows(run / "metrics.csv")[-1]["global_step"]) >= 6500


def test_importing_does_nothing(case, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(case.script.parent)!r}); import {case.module.__name__}"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, list(tmp_path.iterdir())) == (0, "", [])


def test_help_says_what_every_argument_is(case, capsys):
    with pytest.raises(SystemExit) as stop:
        case.module.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    source = inspect.getsource(case.module.Args)
    for field in case.module.Args.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in text and re.search(rf"^    {field}: .*# .{{10}}", source, re.MULTILINE), field


# ----- the same run -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("ppo_atari", ["--precision", "fp32"]),
        ("ppo_atari", ["--precision", "bf16"]),
        ("ppo_continuous", []),
        ("ppo_continuous", ["--norm-value-targets", "--no-norm-reward", "--obs-norm", "ema"]),
    ],
)
def test_same_seed_same_run(tmp_path, name, arguments):
    case = CASES[name]
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        result = run_script(case.script, tmp_path / folder, "--total-timesteps", 3000, *case.small, *arguments)
        assert result.returncode == 0, result.stderr
    assert_same_run(only_run(tmp_path / "one"), only_run(tmp_path / "other"))


def test_another_seed_is_another_run(case, tmp_path, monkeypatch):
    arguments = ["--total-timesteps", 2000, *case.small]
    one, other = (train(case.module, tmp_path, monkeypatch, "--seed", seed, *arguments) for seed in (1, 2))
    assert rows(one / "episodes.csv") != rows(other / "episodes.csv")


@pytest.mark.parametrize(
    "name, size",
    [
        ("ppo_atari", "--num-envs 8 --num-steps 32 --num-minibatches 2 --update-epochs 1"),
        ("ppo_continuous", "--env-id Hopper-v5 --num-envs 2 --num-steps 128 --num-minibatches 4 --update-epochs 10"),
        (
            "ppo_continuous",
            "--env-id Hopper-v5 --num-envs 4 --num-steps 64 --vector-mode async --norm-value-targets --no-norm-reward",
        ),
    ],
)
def test_killed_and_resumed_is_the_run_that_was_never_killed(tmp_path, name, size):
    script, arguments = CASES[name].script, ["--total-timesteps", 12_000, "--checkpoint-interval", 1500, *size.split()]
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    with subprocess.Popen(command(script, *arguments), cwd=tmp_path / "killed", stdout=subprocess.DEVNULL) as process:
        wait_for_rows(process, tmp_path / "killed", 6100 // 256)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    run = only_run(tmp_path / "killed")
    before = saved(run)["global_step"]
    assert 3000 < before < 12_000
    with open(run / "episodes.csv", "a") as file:
        file.write("9999,1,2")  # a row that the kill cut short
    result = run_script(script, tmp_path / "killed", "--resume", f"runs/{run.name}")
    assert result.returncode == 0 and f"resuming at step {before:,}" in result.stdout, result.stderr
    assert run_script(script, tmp_path / "whole", *arguments).returncode == 0
    assert_same_run(only_run(tmp_path / "whole"), run)
    steps = [int(row["global_step"]) for row in rows(run / "episodes.csv")]
    assert sum(step <= before for step in steps) >= 10 and sum(step > before for step in steps) >= 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(case, tmp_path, number):
    for name in ("stopped", "whole"):
        (tmp_path / name).mkdir()
    arguments = ["--total-timesteps", 6000, *case.small]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(case.script, *arguments), cwd=tmp_path / "stopped", **pipes) as process:
        wait_for_rows(process, tmp_path / "stopped", 5)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    run = only_run(tmp_path / "stopped")
    step = saved(run)["global_step"]
    assert process.returncode == 128 + number and "Traceback" not in errors
    assert 0 < step < 6000 and f"stopped and saved at step {step:,}; to go on: python" in output and "--resume runs/" in output
    assert int(rows(run / "metrics.csv")[-1]["global_step"]) == step
    assert run_script(case.script, tmp_path / "stopped", "--resume", f"runs/{run.name}").returncode == 0
    assert run_script(case.script, tmp_path / "whole", *arguments).returncode == 0
    assert_same_run(only_run(tmp_path / "whole"), run)


def test_init_from_starts_from_the_parameters_of_another_run(case, tmp_path, monkeypatch):
    first = train(case.module, tmp_path, monkeypatch, "--total-timesteps", 512, *case.small)
    arguments = ["--init-from", first, "--learning-rate", 1e-30, "--total-timesteps", 128]
    second = train(case.module, tmp_path, monkeypatch, *arguments, *case.small)
    one, other = saved(first)["agent"], saved(second)["agent"]
    shutil.rmtree(first)
    train(case.module, tmp_path, monkeypatch, "--resume", second)  # needs the first run no more
    tensors = [name for name in one if isinstance(one[name], torch.Tensor)]
    assert first != second and tensors
    assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-20) for name in tensors)


def test_weights_and_biases_offline(case, tmp_path):
    arguments = ["--total-timesteps", 256, *case.small, "--track"]
    result = run_script(case.script, tmp_path, *arguments, WANDB_MODE="offline", WANDB_SILENT="true")
    assert result.returncode == 0, result.stderr
    assert list(only_run(tmp_path).glob("wandb/offline-run-*/*.wandb"))


def test_two_runs_of_the_same_second_do_not_share_a_folder(case, tmp_path, monkeypatch):
    monkeypatch.setattr(case.module.time, "time", lambda: 1234567890.0)
    one, other = (train(case.module, tmp_path, monkeypatch, "--total-timesteps", 128, *case.small) for _ in range(2))
    assert one != other and one.name + "-2" == other.name


# ----- bad input --------------------------------------------------------------------------------------------------------------
def refused(module: ModuleType, capsys: pytest.CaptureFixture, *arguments: object) -> str:
    """The one line with which the script answers these arguments before it makes anything."""
    before = set(Path.cwd().rglob("*"))
    with pytest.raises(SystemExit) as stop:
        module.train(module.parse_args([*map(str, arguments)]))
    errors = capsys.readouterr().err
    assert stop.value.code == 2 and errors.startswith("error: ") and errors.count("\n") == 1, errors
    assert set(Path.cwd().rglob("*")) == before
    return errors


BAD = {
    "--num-envs 0": "--num-envs 0: must be a finite number, at least 1",
    "--num-steps -128": "--num-steps -128",
    "--update-epochs 0": "--update-epochs 0",
    "--checkpoint-interval 0": "--checkpoint-interval 0",
    "--learning-rate 0": "above 0",
    "--learning-rate nan": "--learning-rate nan",
    "--gamma 1.5": "at most 1",
    "--target-kl -1": "--target-kl -1.0",
    "--seed -1": "--seed -1",
    "--exp-name a/b": "--exp-name 'a/b'",
    "--resume=": "not a run folder",
    "--device gpu": "must be auto, cpu, cuda, cuda:N or mps",
    "--device cuda:99": "does not work here",
    "--resume nowhere": "not a run folder",
    "--init-from nowhere": "not a run folder",
}
BAD_OF = {
    "ppo_atari": {
        "--env-id NoSuchGame-v4": "not a known environment",
        "--env-id CartPole-v1": "not an Atari game",
        "--env-id Breakout-v4": "try BreakoutNoFrameskip-v4 or ALE/Breakout-v5",
        "--env-id Pong-v0": "try PongNoFrameskip-v4 or ALE/Pong-v5",
        "--num-minibatches 3": "must divide num-envs * num-steps = 1024",
        "--num-minibatches 1024": "--norm-adv needs 2 samples",
        "--total-timesteps 1023": "must be at least one iteration, num-envs * num-steps = 1024 steps",
        "--mask-actions": "--full-action-space",
    },
    "ppo_continuous": {
        "--env-id HalfCheeta-v5": "HalfCheetah",
        "--env-id CartPole-v1": "Discrete(2) actions",
        "--env-id no_such_module:Some-v0": "no_such_module",
        "--num-minibatches 3": "must divide num-envs * num-steps = 2048",
        "--num-minibatches 2048": "--norm-adv needs 2 samples",
        "--total-timesteps 2047": "must be at least one iteration, num-envs * num-steps = 2048 steps",
        "--norm-value-targets": "add --no-norm-reward",
    },
}
ALL_BAD = [(name, arguments, says) for name in CASES for arguments, says in (BAD | BAD_OF[name]).items()]


@pytest.mark.parametrize("name, arguments, says", ALL_BAD, ids=[f"{name} {arguments}" for name, arguments, _ in ALL_BAD])
def test_bad_input_is_one_clear_line(name, arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert says in refused(CASES[name].module, capsys, *arguments.split())


@pytest.mark.parametrize("arguments, says", [("--precision fp8", "'auto'"), ("--sed 3", "Unrecognized")])
def test_bad_words_are_answered_too(case, arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        case.module.parse_args(arguments.split())
    assert stop.value.code == 2 and says in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_run_folder_that_cannot_be_written(case, tmp_path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    result = run_script(case.script, tmp_path, "--total-timesteps", 128, *case.small)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "runs" in result.stderr, result.stderr


def test_bad_checkpoints_are_refused_and_a_resume_changes_nothing_else(case, tmp_path, monkeypatch, capsys):
    run = train(case.module, tmp_path, monkeypatch, "--total-timesteps", 128, *case.small)
    capsys.readouterr()

    def answer(*arguments):
        return refused(case.module, capsys, *arguments)

    assert "started with 1" in answer("--resume", run, "--seed", 2)
    assert "can only grow" in answer("--resume", run, "--total-timesteps", 127)
    assert "does not fit" in answer("--init-from", run, "--env-id", case.other_env)
    whole = (run / "checkpoint.pt").read_bytes()
    (run / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    assert "damaged" in answer("--resume", run)
    (run / "checkpoint.pt").write_bytes(b"")
    assert "damaged" in answer("--resume", run)
    torch.save({"something": "else"}, run / "checkpoint.pt")
    assert "not written by this script" in answer("--resume", run)

    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"args": Malicious()}, run / "checkpoint.pt")
    assert "damaged" in answer("--resume", run)
    assert not (tmp_path / "executed").exists()
    (run / "checkpoint.pt").write_bytes(whole)
    (run / "episodes.csv").write_text("")
    assert "shorter" in answer("--resume", run)
