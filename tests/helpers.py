"""What the tests of all scripts share."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator


def command(script: Path, *arguments: object) -> list[str]:
    return [sys.executable, str(script), *map(str, arguments)]


def run_script(script: Path, folder: Path, *arguments: object, **env: str) -> subprocess.CompletedProcess:
    streams = {"capture_output": True, "text": True}
    return subprocess.run(command(script, *arguments), cwd=folder, env=os.environ | env, **streams, timeout=300)


def train(module: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Path:
    """Trains in this process, with the runs under `folder`; returns the run folder."""
    monkeypatch.chdir(folder)
    return folder / module.train(module.parse_args([*map(str, arguments)]))


def wait_for_rows(process: subprocess.Popen, folder: Path, count: int) -> None:
    """Until metrics.csv of the run that the process writes under `folder` has so many rows."""
    deadline = time.time() + 200
    while time.time() < deadline and process.poll() is None:
        metrics = next(folder.glob("runs/*/metrics.csv"), None)
        if metrics and len(metrics.read_text().splitlines()) > count:
            return
        time.sleep(0.02)
    pytest.fail(f"the run ended or hung before {count} rows")


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def rows(path: Path, without: tuple[str, ...] = ("seconds", "sps")) -> list[dict[str, str]]:
    """The rows of a CSV without its wall-clock columns."""
    with open(path, newline="") as file:
        return [{key: value for key, value in row.items() if key not in without} for row in csv.DictReader(file)]


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run: steps and values by tag."""
    events = EventAccumulator(str(run))
    events.Reload()
    tags = [tag for tag, content in events.summary_metadata.items() if content.plugin_data.plugin_name == "scalars"]
    return {tag: [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(tag)] for tag in tags}


def saved(run: Path) -> dict:
    return torch.load(run / "checkpoint.pt", weights_only=True)


def assert_same(one: object, other: object, name: str) -> None:
    """Equal to the last bit, through all levels of a checkpoint."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), name
        for key in one:
            assert_same(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), name
    else:
        assert one == other, name


def assert_same_run(one: Path, other: Path) -> None:
    """Equal games, metrics, weights, statistics and random generators; wall-clock columns aside."""
    for name in ("episodes.csv", "metrics.csv"):
        assert rows(one / name) == rows(other / name)
        assert rows(one / name), name
    shown, also_shown = scalars(one), scalars(other)
    shown.pop("charts/SPS"), also_shown.pop("charts/SPS")
    assert shown == also_shown and len(shown) == 11
    one, other = saved(one), saved(other)
    one.pop("run"), other.pop("run")  # seconds and commands
    assert_same(one, other, "checkpoint")
