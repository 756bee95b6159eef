"""What exactness makes needless is not run: a step's only forward passes of the learner are those of its update."""

from __future__ import annotations

import pytest

from onegrid.cli.train import run
from onegrid.learner.learner import Learner
from tests.rl.tiny import write_tiny_run


@pytest.mark.parametrize(
    ("settings", "updates_only"),
    [((), True), (("sampling.record_routing=true",), True), (("correction.mode=token_truncate",), False)],
    ids=str,
)
def test_an_exact_pairing_takes_no_pass_for_old_log_probs(settings, updates_only, tmp_path, monkeypatch):
    passes, micro_batches = [], []
    forward, update = Learner.forward, Learner.forward_backward

    def counted(self, *args, **kwargs):
        passes.append(1)
        return forward(self, *args, **kwargs)

    def updated(self, *args, **kwargs):
        report = update(self, *args, **kwargs)
        micro_batches.append(report.num_micro_batches)
        return report

    monkeypatch.setattr(Learner, "forward", counted)
    monkeypatch.setattr(Learner, "forward_backward", updated)
    settings = [*settings, "loop.reference_every=0", "learner.max_tokens=40", 'guard.off=["probe"]']
    run(write_tiny_run(tmp_path), settings, run_dir=tmp_path / "run", num_steps=2, resume=False, dry_run=False)
    assert len(micro_batches) == 2 and all(count > 1 for count in micro_batches)
    assert (len(passes) == sum(micro_batches)) is updates_only
    assert len(passes) <= 2 * sum(micro_batches)
