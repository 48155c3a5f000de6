"""The demo, with fewer steps, from a folder that is not the project's."""

from pathlib import Path

import pytest
from helpers.command_helpers import run_command

from parnas.config.loader import PRESETS, load_config
from parnas.runs.run import Run


@pytest.mark.slow
def test_the_demo_ends_with_string_table_pictures_and_activation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {"search.steps": 30, "search.alpha_start_step": 5, "train.steps": 30, "train.eval_every": 30}
    changes |= {"train.save_every": 30, "runtime.threads": 1, "search.rerank_top_k": 2}
    changes |= {"model.d_model": 32, "model.n_heads": 2, "model.d_inner": 64}
    small = load_config(PRESETS / "demo.yaml", [f"{key}={value}" for key, value in changes.items()])
    monkeypatch.setattr("parnas.config.loader.load_config", lambda _: small)
    assert run_command("demo", "--run", "runs/demo") == 0
    out = capsys.readouterr().out
    string = Run("runs/demo/search").derivation().arch
    assert f"architecture: {string}" in out
    for name in ("derived", "interleaved", "alternating-6", "bits/byte", "ms/seg."):
        assert name in out
    pictures = [Path(line.removeprefix("written: ")) for line in out.splitlines() if line.endswith((".gif", ".png"))]
    assert {"pi.gif", "curves.png"} <= {path.name for path in pictures}
    assert all(path.stat().st_size > 1000 for path in pictures)
    assert out.strip().splitlines()[-1].startswith(("next: source ", "next: parnas"))
