"""sample.py as a user runs it."""

import runpy
import sys

import numpy as np
import torch
from conftest import ROOT


def sample(monkeypatch, folder, *args):
    """`python sample.py ...` in this process, in `folder`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "sample.py"), *map(str, args)])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


def pixels(path):
    return np.load(path)["arr_0"]
