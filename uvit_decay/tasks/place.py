"""The place in an epoch at which a resumed run begins."""

from __future__ import annotations

from typing import Any


def recount(loop: dict[str, Any], epoch: int, pieces: int) -> None:
    """Set the counts of Lightning's fit loop to a place within an epoch, from the number of global batches so far.

    Two things make them wrong. Lightning counts pieces as batches, of which a global batch may have had another number.
    And a run that ends before its last epoch does, at its last step or on a signal, counts that epoch as whole: when
    resumed, a run of so many epochs would leave out the rest of it, and begin again with the first batch.

    Args:
        loop: state of the loop, which is changed.
        epoch: global batches of an epoch of this run; with 0 there is no place.
        pieces: pieces of a global batch in this run.
    """
    done = loop["state_dict"]["combined_loader"][0]["start"]
    if not (done and epoch):
        return
    whole, last = divmod(done - 1, epoch)
    for counts in loop["epoch_progress"].values():
        counts.update(ready=whole + 1, started=whole + 1, processed=whole, completed=whole)
    batches = loop["epoch_loop.batch_progress"]
    current, total = batches["current"], batches["total"]
    batches["is_last_batch"] = last + 1 == epoch
    # The hook that saves at a step runs before the batch is `completed`, the one at the end of training after it. At
    # the end of an epoch only the former is taken for a place within it.
    if batches["is_last_batch"] and current["completed"] == current["ready"]:
        current["completed"] -= 1
        total["completed"] -= 1
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    # A checkpoint is saved after the last piece of a global batch: convert `ready`, and keep what others are below it.
    ready = current["ready"]
    for key, count in current.items():
        current[key] = (last + 1) * pieces - (ready - count)
