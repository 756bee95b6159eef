"""`onegrid serve` and `onegrid train` against it: two processes, one policy, the record of a run in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onegrid.cli.train import run
from onegrid.guard.config import CHECKS
from onegrid.rl.record import read_metrics
from tests.patience import PATIENCE_S
from tests.rl.tiny import lines_without_clocks, write_tiny_run
from tests.sampler.served import post

SOURCES = str(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(configuration, url, token file) of a server in a process of its own."""
    folder = tmp_path_factory.mktemp("served")
    path = write_tiny_run(folder)
    token = folder / "token"
    token.write_text("of-the-test\n")
    command = [sys.executable, "-c", "from onegrid.cli import main; main()", "serve", str(folder / "model")]
    command += ["--recipe", str(path), "--token-file", str(token), "--port", "0", "--device", "cpu"]
    command += ["--max-len", "16", "--max-slots", "8"]
    environment = os.environ | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline(), server.stdout.readline()]
        yield path, lines[1].split()[-1], token
        server.terminate()
        server.wait(PATIENCE_S)


def test_a_run_through_http_is_exact_and_writes_the_record_of_a_run_in_one_process(served, tmp_path):
    path, url, token = served
    run(path, [], run_dir=tmp_path / "here", num_steps=2, resume=False, dry_run=False)
    there = ["sampler.engine=remote", f"sampler.remote.url={url}", f"sampler.remote.token_file={token}"]
    run(path, there, run_dir=tmp_path / "there", num_steps=2, resume=False, dry_run=False)
    assert lines_without_clocks(tmp_path / "there") == lines_without_clocks(tmp_path / "here")
    for line in read_metrics(tmp_path / "there")[1:]:
        assert line["mismatch/max_abs"] == 0.0 and line["mismatch/share_equal"] == 1.0
        assert {line[f"guard/{check}"] for check in (*CHECKS, "transaction")} == {1}


def test_the_server_answers_others_too_with_the_version_it_was_trained_to(served):
    _, url, token = served
    headers = {"authorization": f"Bearer {token.read_text().strip()}"}
    asked = {"prompt": "1+2=", "max_tokens": 2, "logprobs": 0, "seed": 1}
    answer = post(f"{url}/v1/completions", json=asked, headers=headers)
    (choice,) = answer.json()["choices"]
    assert choice["version"] >= -1 and len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"])
    assert post(f"{url}/v1/completions", json=asked).status_code == 401
