"""A run is one folder, runs/<experiment>/version_N: its log, histories and checkpoints, and how it is resumed.

1. `checkpoints.find_newest` finds the checkpoint that `--ckpt_path auto` or `last` means: in the run with the highest
   number the checkpoint with the highest step. `auto` skips runs whose settings differ in something that changes
   weights (`settings.is_same_run`).
2. The bytes of this file are compared with their checksums; if they differ, the next newest checkpoint is taken.
   `checkpoints.Checkpoints` opens each file once: only the chosen one is read to its end.
3. `resume.resume` checks it against this run before any work: names, shapes and finiteness of all tensors
   (`form.check_form`), the function of the network, and all settings that decide how training continues
   (`check.check`). Each difference is named, with the flag that undoes it; `--resume.allow` accepts the differences
   that it lists.
4. Lightning loads the file again and restores weights, averages, moments and counters. The task checks classes and
   images of the data and replaces the counters of Lightning's loops (`restore.restore_run`).
5. Training continues with the next global batch: everything else in a step is a function of the seed and the step.
   The learning rate, its schedule and all settings of the optimizer are the settings of this run.
"""

from uvit_decay.runtime.program import lazy

MODULES = {
    "RunLogger": "log",
    "Measurement": "history",
    "guard": "loggers",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
