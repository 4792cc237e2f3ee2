"""Checkpoints by torch.distributed.checkpoint: whole or absent, readable by another number of ranks."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch.distributed import checkpoint as dcp

_NAME = re.compile(r"step-(\d{12})")


@dataclass
class Progress:
    """Where training stands.

    Args:
        epoch: the epoch that is next or under way.
        step_in_epoch: its next step.
        step: optimizer steps done.
        num_examples: candidates seen, over all ranks.
        best_auc: of the validations so far.
        best_epoch: after which it was seen.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    num_examples: int = 0
    best_auc: float = -math.inf
    best_epoch: int = 0


class CheckpointFolder:
    """A folder of checkpoints, the newest of which is the one to resume from.

    A checkpoint is written under a hidden name and renamed when every rank is done: a job killed in between leaves
    nothing that a reader would take for one.

    Args:
        folder: made where it is missing; must be shared by all ranks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._step_on_disk = -1
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for torn in folder.glob(".writing-*"):
                shutil.rmtree(torn)
        dist.barrier()

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))
        return found[-1] if found else None

    def save(self, state: dict[str, Any], progress: Progress, num_kept: int) -> Path:
        """Write, then drop the oldest; collective.

        Args:
            state: nested dicts of tensors and plain values.
            progress: where training stands.
            num_kept: checkpoints that stay.

        Returns:
            The checkpoint's folder.
        """
        final = self.folder / f"step-{progress.step:012d}"
        if progress.step == self._step_on_disk:  # saved in the epoch's last step and at its end: only progress is new
            if dist.get_rank() == 0:
                _replace_text(final / "progress.json", json.dumps(asdict(progress)))
            dist.barrier()
            return final
        writing = self.folder / f".writing-{final.name}"
        dcp.save(state, storage_writer=dcp.FileSystemWriter(writing, thread_count=1))
        if dist.get_rank() == 0:
            (writing / "progress.json").write_text(json.dumps(asdict(progress)))
            writing.rename(final)
            whole = sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))
            for old in whole[:-num_kept]:
                shutil.rmtree(old)
        dist.barrier()
        self._step_on_disk = progress.step
        return final

    def load_newest(self, state: dict[str, Any]) -> Progress | None:
        """Load the newest checkpoint into the tensors of `state`; collective.

        Args:
            state: as it was saved, from a trainer on any number of ranks.

        Returns:
            Where training stood, or None where there is no checkpoint.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        newest = self.newest()
        if newest is None:
            return None
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(newest))
        except (dcp.api.CheckpointException, KeyError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"the checkpoint {newest} does not fit this model ({str(error).splitlines()[0][:200]}); use another "
                "checkpoint folder, or the config that wrote it"
            ) from error
        progress = Progress(**json.loads((newest / "progress.json").read_text()))
        self._step_on_disk = progress.step
        return progress


def _replace_text(path: Path, text: str) -> None:
    """Write a file anew; a reader sees the old text or the new."""
    writing = path.with_name(f".writing-{path.name}")
    writing.write_text(text)
    writing.replace(path)
