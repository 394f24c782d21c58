"""A run is one folder, runs/<experiment>/version_N: its log, histories and checkpoints, and how it is resumed.

A launch of train.py with --ckpt_path, in order; scripts that pass `ckpt_path` to `Trainer.fit` begin with step 5:

1. The checkpoint: `checkpoints.find_newest` finds the file that `auto` or `last` means. In the run with the highest
   number it takes the checkpoint with the highest step; `auto` skips runs whose settings differ in something that
   changes weights (`settings.is_same_run`). If its bytes do not fit their checksums, the next newest one is taken.
2. The checks before any work (`compatibility.check`): the function of the network and all settings that decide how
   training continues; names and shapes of weights and moments, and finite weights. Each setting that differs is named,
   with the flag that undoes it; `--resume.allow` accepts the differences that it lists.
3. The folder (`resume.resume`): the run goes on in the folder of the checkpoint if it is the newest one there and the
   settings keep the weights what they would have been. The folder is locked, after a wait for a program that still
   writes to it. Otherwise the run gets a new folder.
4. The loggers continue their records of the run (`launch.go_on`); config.yaml and a line of launches.jsonl are written
   (`launch.SaveConfig`).
5. Lightning loads the file again. The task checks classes and images of the data (`restore.restore_run`). The histories
   are cut back to the step of the checkpoint, or copied to the new folder up to this step. Weights, averages, moments
   and the counters of Lightning's loops are restored.
6. Previews, metrics and probes that were due at this step and have no result are computed first.
7. Training continues with the next global batch: everything else in a step is a function of the seed and the step.
   The learning rate, its schedule and all settings of the optimizer are the settings of this run.

`resumable.Resumable` says what this package needs of a task; `lightning_private` has all that depends on private state
of Lightning.
"""

from uvit_decay.terminal.program import lazy

MODULES = {
    "RunLogger": "log",
    "Measurement": "history",
    "guard": "loggers",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
