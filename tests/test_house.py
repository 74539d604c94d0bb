"""The package as a guest in an environment: whose names it takes, and who its neighbours are."""

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("sweeps", "dashboards", "runners", "mechanisms", "kernels")


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_ours(room: str) -> None:
    """`kernels` and `sweeps` are also distributions of others: each room has to resolve into this one."""
    module = importlib.import_module(room)
    assert Path(module.__file__ or "").resolve().parent == ROOT / room


def test_every_room_is_packaged() -> None:
    """A folder of code that pyproject.toml forgets is missing from an install."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for room in ROOMS:
        for package in [ROOT / room, *(p.parent for p in (ROOT / room).rglob("__init__.py"))]:
            name = ".".join(package.relative_to(ROOT).parts)
            assert f'"{name}"' in text, f"{name} is not among the packages"


@pytest.mark.wide
def test_transformers_works_beside_our_kernels() -> None:
    """transformers asks which distribution owns `kernels` and takes one version range for Hugging Face's."""
    script = """
import logging, torch, kernels
logging.disable(logging.WARNING)
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     bos_token_id=1, eos_token_id=2, pad_token_id=0)
logits = LlamaForCausalLM(config)(torch.zeros(1, 4, dtype=torch.long)).logits
assert logits.shape == (1, 4, 32) and logits.isfinite().all()
print("ran beside", kernels.__file__)
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert str(ROOT / "kernels") in ran.stdout


def test_dependencies_do_not_bring_foreign_rooms() -> None:
    """No installed distribution but ours provides a top-level module with a room's name."""
    owners = importlib.metadata.packages_distributions()
    for room in ROOMS:
        others = [name for name in owners.get(room, []) if name != "memsweep"]
        assert not others, f"{room} also comes with {others}"
