"""Are all nodes alike? Settings, data, versions, the run folder and clocks, compared over the ranks of a meeting."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import singledispatch
from typing import Any

import numpy as np

from uvit_decay.data.batches import ImageSet, InMemory
from uvit_decay.data.folder import OnDisk
from uvit_decay.data.latents.shards import LatentSet
from uvit_decay.preflight.environment import versions
from uvit_decay.preflight.launch import launch
from uvit_decay.preflight.meeting import Meeting
from uvit_decay.preflight.plan import Run
from uvit_decay.preflight.report import Finding
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import writing

CLOCKS = 5.0  # seconds by which clocks may differ: time stamps of files and logs, never a result
FILES = 1000  # files whose sizes are read, spread over the set
PLACES = {"data.path", "data.test_path"}  # which may differ where the nodes have copies
LISTED = 5.0  # seconds until a new file must be seen on a shared folder
STARTED = "UVIT_DECAY_PREFLIGHT"  # set for the processes that Lightning starts on a node which has passed


def compare(run: Run, meeting: Meeting) -> Iterator[Finding]:
    """Yield what differs between the ranks, the same findings on all of them."""
    times = meeting.agree("clock", time.time(), lambda times: times)
    late = max(times) - min(times)
    if late > CLOCKS:
        yield Finding("warning", "clocks", f"those of the nodes differ by {late:.0f} s", "synchronise them (NTP)")
    mine = {"host": socket.gethostname(), "versions": versions(), "settings": flags(run), "data": data_facts(run)}
    yield from (Finding(*found) for found in meeting.agree("facts", mine, _differences))
    yield from _shared_folder(run, meeting)


def flags(run: Run) -> dict[str, str]:
    """Return all settings as text, by name."""
    return {name: json.dumps(value, default=str) for name, value in run.settings.items()}


def data_facts(run: Run) -> dict[str, str]:
    """Return the hash and the size of the data, or why they cannot be read; loads them."""
    try:
        if run.data.train is None:
            run.data.load()
    except UserError as error:
        return {"error": str(error)}
    digest = hashlib.sha256(json.dumps([run.data.channels, run.data.image_size, *run.data.class_names]).encode())
    for images in (run.data.train, run.data.test):
        if images is not None:
            digest.update(images.labels.numpy().tobytes())
            digest.update(listed(images))
    return {
        "sha256": digest.hexdigest()[:12],
        "images": str(len(run.data.train)),
        "classes": str(len(run.data.class_names)),
    }


@singledispatch
def listed(images: ImageSet) -> bytes:
    """Return what tells a set from another one without reading all of it: names and sizes of its files."""
    return b""


@listed.register
def _(images: OnDisk) -> bytes:
    listing = images.listing
    names, tars = [listing.members[i] for i in images.chosen], listing.tars
    sizes = [listing.path.stat().st_size] if listing.path.is_file() else []
    if listing.path.is_dir() and not tars:
        sizes = [(listing.path / name).stat().st_size for name in names[:: -(-len(names) // FILES)]]
    return json.dumps([names, list(tars), sizes]).encode()


@listed.register
def _(images: InMemory) -> bytes:
    rows = np.linspace(0, len(images) - 1, min(len(images), FILES)).astype(int).tolist()
    pixels = images.images[rows].cpu().contiguous().numpy()
    return json.dumps([list(images.images.shape), zlib.crc32(pixels)]).encode()


@listed.register
def _(images: LatentSet) -> bytes:
    names = [name for name, _ in images.manifest.shards]
    return json.dumps([images.manifest.fingerprint, [(images.folder / name).stat().st_size for name in names]]).encode()


def _differences(facts: list[dict[str, Any]]) -> list[list[str]]:
    """Return the findings, as lists, of rank 0 from the facts of all ranks: one for each kind of difference."""
    findings: list[Finding] = []
    first = facts[0]
    for rank, other in enumerate(facts):
        findings += _unlike(f"rank {rank} on {other['host']}", other, f"rank 0 on {first['host']}", first)
    kinds: dict[tuple[str, str], Finding] = {}
    for finding in findings:  # of many ranks that differ alike, the first one speaks
        kinds.setdefault((finding.level, finding.subject), finding)
    found = list(kinds.values())
    if all(finding.level != "error" for finding in found):
        same = f"settings, data ({first['data']['images']} images, {first['data']['sha256']}) and versions"
        found.append(Finding("ok", "nodes", f"{len(facts)} processes have the same {same}"))
    return [list(asdict(finding).values()) for finding in found]


def _unlike(who: str, other: dict[str, Any], whose: str, first: dict[str, Any]) -> Iterator[Finding]:
    if "error" in other["data"]:
        yield Finding("error", "data", f"{who}: {other['data']['error']}", "the data must be on every node")
    elif "error" not in first["data"] and (name := _unequal(other["data"], first["data"])):
        text = f"{who} has data with {name} {other['data'][name]}, {whose} {first['data'][name]}"
        yield Finding("error", "data", text, "copy the same images to all nodes, or use one shared folder")
    if name := _unequal(other["versions"], first["versions"]):
        text = f"{who} has {name} {other['versions'].get(name)}, {whose} {first['versions'].get(name)}"
        yield Finding("error", "versions", text, f"install the same {name} on all nodes")
    names = {name for name in (other["settings"] | first["settings"]) if _of(other, name) != _of(first, name)}
    places = names & PLACES
    for level, found in (("warning", places), ("error", names - places)):
        if found:
            name = min(found)
            text = f"{who} has --{name} {_of(other, name)}, {whose} {_of(first, name)}"
            yield Finding(level, "settings" if level == "error" else "paths", text, "start all with the same flags")


def _of(facts: dict[str, Any], name: str) -> str | None:
    return facts["settings"].get(name)


def _unequal(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Return the first name whose values differ."""
    return next((name for name in ours | theirs if ours.get(name) != theirs.get(name)), None)


def _shared_folder(run: Run, meeting: Meeting) -> Iterator[Finding]:
    """Write a file on rank 0, and look for it on the others."""
    name = meeting.agree("token", secrets.token_hex(8), lambda tokens: f".preflight-{tokens[0]}")
    token = run.folder / name
    try:
        if meeting.rank == 0:
            with writing(run.folder):
                run.folder.mkdir(parents=True, exist_ok=True)
                token.touch()
        meeting.agree("written", None, lambda _: None)
        start = time.monotonic()
        while not (seen := token.exists()) and time.monotonic() - start < LISTED:
            time.sleep(0.1)
            os.scandir(run.folder.parent).close() if run.folder.parent.is_dir() else None  # NFS looks again
        mine = {
            "seen": seen,
            "who": f"rank {meeting.rank} on {socket.gethostname()}",
            "path": str(run.folder.resolve()),
        }
        found = meeting.agree("folder", mine, _blind)
    finally:
        token.unlink(missing_ok=True)
    yield Finding(*found)


def _blind(facts: list[dict[str, Any]]) -> list[str]:
    without = [fact for fact in facts if not fact["seen"]]
    if not without:
        return ["ok", "run folder", f"{facts[0]['path']}, shared by all nodes", ""]
    text = f"{facts[0]['path']} of rank 0 is not seen as {without[0]['path']} by {without[0]['who']}"
    return ["error", "run folder", text, "--trainer.logger.save_dir <a folder that all nodes share>"]


def short_form(run: Run) -> Meeting | None:
    """Check what differs between the nodes before a run on several; print one line if all is well.

    Returns:
        the meeting, whose store training uses afterwards; None where there was none to hold.

    Raises:
        UserError: on all ranks, with the same line.
    """
    if run.trainer.num_nodes == 1 or STARTED in os.environ or not run.has_ranks:
        return None
    for finding in launch(run):
        if finding.level == "error":
            raise UserError(f"{finding.text}; {finding.flag}")
    with Meeting.of(run) as meeting:  # waits as long as training would: nodes may be started by hand
        seconds = meeting.all_reduce(run.trainer.strategy.root_device)
        if run.trainer.local_rank == 0:
            run.data.prepare_data()
        meeting.agree("prepared", None, lambda _: None)
        findings = list(compare(run, meeting))
        for finding in findings:
            if finding.level == "error":
                meeting.farewell()  # outside the meeting each would look for the others, to tell them
                raise UserError(f"{finding.text}; {finding.flag}")
    if meeting.rank == 0:
        texts = ", ".join(finding.text for finding in findings if finding.level in ("ok", "warning"))
        print(f"{run.trainer.num_nodes} nodes: all-reduce in {seconds:.2f} s, {texts}")
    os.environ[STARTED] = "passed"
    return meeting
